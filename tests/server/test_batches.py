"""/v1/files and /v1/batches with the openai client: results, cancelling, owners, limits, a restart."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import RunningServer, eventually, running_server
from weft.objects.database import Bounds
from weft.server.batches.files import FileStore
from weft.server.batches.routes import BatchRecord, BatchRunner

LINES_MAX = 60


def lines(count: int, *, text: str = "ok", **body: Any) -> bytes:
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"say:{text}{i}", **body}}
        for i in range(count)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "files"


@pytest.fixture(scope="module")
def server(model_directory: Path, root: Path) -> Iterator[RunningServer]:
    flags = {
        "api_key": ["one", "two"],
        "file_store": str(root),
        "max_batch_lines": LINES_MAX,
        "max_stored_files": 30,
        "file_store_size": "200KB",
    }
    with running_server("build", engine={"model": str(model_directory)}, server=flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client(api_key="one")


def uploaded(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch").id


def created(client: openai.OpenAI, file_id: str) -> Any:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
    )


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    assert eventually(
        lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled", "expired"), limit_s=30
    )
    return client.batches.retrieve(batch_id)


def rows(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    return {row["custom_id"]: row for row in found}


def test_a_batch_goes_from_upload_to_results(client: openai.OpenAI, root: Path) -> None:
    bad = json.dumps(
        {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 1000}}
    ).encode()
    content = lines(12) + bad
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "in.jsonl", "batch", "processed")
    assert client.files.content(file.id).read() == content
    made = created(client, file.id)
    assert (made.status, made.endpoint, made.metadata) == ("validating", "/v1/completions", {"who": "me"})
    assert (made.request_counts.completed, made.request_counts.failed) == (0, 0)
    batch = ended(client, made.id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 13, 12, 1)
    answers = rows(client, batch.output_file_id)
    assert {name: row["response"]["body"]["choices"][0]["text"] for name, row in answers.items()} == {
        f"r{i}": f"ok{i}" for i in range(12)
    }
    [error] = rows(client, batch.error_file_id).values()
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "n"
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    assert {file.id, batch.output_file_id, batch.error_file_id} <= {one.id for one in client.files.list()}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}
    assert not list(root.glob("*.part"))


def test_another_key_sees_nothing_of_it(server: RunningServer, client: openai.OpenAI) -> None:
    file_id = uploaded(client, lines(1))
    batch_id = ended(client, created(client, file_id).id).id
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0)
    assert list(other.files.list()) == []
    assert list(other.batches.list()) == []
    for refused in (
        lambda: other.files.content(file_id),
        lambda: other.files.delete(file_id),
        lambda: other.batches.retrieve(batch_id),
        lambda: other.batches.cancel(batch_id),
        lambda: created(other, file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    assert client.files.retrieve(file_id).id == file_id


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (lines(1) + lines(1), "duplicate_custom_id", 2),
        (b"{\n", "invalid_json_line", 1),
        (lines(LINES_MAX + 1), "too_many_lines", LINES_MAX + 1),
        (lines(2).replace(b'"r1"', b'""'), "invalid_custom_id", 2),
        (lines(1).replace(b"POST", b"PUT"), "invalid_method", 1),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}', "invalid_body", 1),
        (b"\n" + lines(1) + b"3", "invalid_json_line", 3),
        (lines(1).replace(b"completions", b"embeddings"), "invalid_url", 1),
    ],
)
def test_an_input_that_is_no_batch_fails_with_its_line(
    client: openai.OpenAI, content: bytes, code: str, line: int
) -> None:
    batch = ended(client, created(client, uploaded(client, content)).id)
    assert batch.status == "failed"
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, line)]


def test_what_cannot_be_kept_is_refused_and_names_the_flag(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match=r"limits\.file_store_size") as full:
        uploaded(client, b"x" * 300_000)
    assert full.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"x"), purpose="assistants")
    headers = {"Authorization": "Bearer one"}
    assert server.post("/v1/files", {"a": 1}, headers=headers).status_code == 415
    broken = httpx.post(
        f"{server.url}/v1/files",
        content=b"no form",
        headers={**headers, "Content-Type": "multipart/form-data; boundary=b"},
    )
    assert broken.status_code == 400
    with pytest.raises(openai.NotFoundError):
        created(client, "file-0")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=1000)


def test_a_batch_is_cancelled_and_an_unfinished_one_survives_a_restart(model_directory: Path, tmp_path: Path) -> None:
    engine = {"model": str(model_directory), "max_num_seqs": 2}
    flags = {"file_store": str(tmp_path / "files")}
    slow = lines(40, text="y" * 60, max_tokens=64)
    with running_server("build_slow", engine=engine, server=flags) as running:
        client = running.client()
        first, second, late = (created(client, uploaded(client, slow)) for _ in range(3))
        assert eventually(lambda: client.batches.retrieve(first.id).request_counts.completed > 0, limit_s=30)
        client.batches.cancel(first.id)
        batch = ended(client, first.id)
        counts = batch.request_counts
        assert batch.status == "cancelled"
        assert 0 < counts.completed < counts.total == 40
        assert len(rows(client, batch.output_file_id)) == counts.completed
        unanswered = rows(client, batch.error_file_id)
        assert len(unanswered) == 40 - counts.completed
        assert {row["error"]["code"] for row in unanswered.values()} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            client.batches.cancel(first.id)
        assert eventually(lambda: client.batches.retrieve(second.id).request_counts.completed > 0, limit_s=30)
    part = tmp_path / "files" / f"{second.id}.output.part"
    with sqlite3.connect(tmp_path / "files" / "objects.sqlite") as raw:
        [record] = raw.execute("SELECT body FROM objects WHERE id = ?", (late.id,)).fetchone()
        expired = re.sub(rb'"expires_at":\d+', b'"expires_at":1', record)
        raw.execute("UPDATE objects SET body = ? WHERE id = ?", (expired, late.id))
    before = part.read_bytes()
    assert before.count(b"\n") < 40
    with running_server("build", engine=engine, server=flags) as running:
        client = running.client()
        batch = ended(client, second.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        content = client.files.content(batch.output_file_id).read()
        assert content.startswith(before[: before.rindex(b"\n") + 1])  # not computed again
        assert len(rows(client, batch.output_file_id)) == 40
        assert client.batches.retrieve(first.id).status == "cancelled"
        batch = ended(client, late.id)
        assert (batch.status, batch.request_counts.completed, batch.output_file_id) == ("expired", 0, None)
        unanswered = rows(client, batch.error_file_id)
        assert len(unanswered) == 40
        assert {row["error"]["code"] for row in unanswered.values()} == {"batch_expired"}


class Held(BatchRunner):
    """Its batches end when they are told to."""

    begun: list[str]
    go: dict[str, asyncio.Event]

    async def _run(self, record: BatchRecord) -> None:
        self.begun.append(record.batch.id)
        await self.go[record.owner].wait()
        record.batch.status = "completed"


async def test_each_key_has_one_batch_at_once_and_none_waits_for_another_key(tmp_path: Path) -> None:
    files = FileStore(tmp_path, Bounds(count=100, bytes=1000, age_s=60.0))
    service: Any = SimpleNamespace(models=SimpleNamespace(death=None))
    runner = Held(service, files, lines_max=10, age_s=60.0, keys=True, tenant_of=lambda owner: None)
    runner.begun, runner.go = [], {key: asyncio.Event() for key in ("a", "b")}

    def create(owner: str) -> str:
        file = files.add(owner, "in", "batch", io.BytesIO(b"x"))
        return runner.create(owner, endpoint="/v1/completions", input_file_id=file.id, metadata=None).id

    first, second = create("a"), create("a")
    runner.start()
    await asyncio.sleep(0.01)
    other = create("b")
    await asyncio.sleep(0.01)
    assert runner.begun == [first, other]
    runner.go["b"].set()
    await asyncio.sleep(0.01)
    assert runner.get(other, "b").status == "completed"
    runner.go["a"].set()
    await asyncio.sleep(0.01)
    assert runner.begun == [first, other, second]
    await runner.stop()
    files.close()
