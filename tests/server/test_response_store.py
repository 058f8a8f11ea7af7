"""Stored responses: bounds, owners, restarts, several processes, and conversations that continue them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItemList

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from weft.errors import ConfigError, RequestError
from weft.schedule.prefix_sharing import SAVED_BY_CLOSING_MIN
from weft.server.config import ServerConfig
from weft.server.responses.store import (
    KIND,
    ResponseStore,
    ResponseStoreError,
    StoredResponse,
    StoreLimits,
    UnknownResponseError,
    open_database,
    read_path,
)

MANY = StoreLimits(count=1000, bytes=10**9, age_s=100.0, turns=50, turn_bytes=10**6)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class Opened:
    """A database of responses, with the limits of a store."""

    def __init__(self, path: Path, limits: StoreLimits, clock: Clock) -> None:
        self.objects = open_database(path, limits, clock)
        self._limits = limits
        self.delete, self.runner_of, self.close = (self.objects.delete, self.objects.runner_of, self.objects.close)

    def put(self, response: StoredResponse, owner: str, runner: str | None = None) -> bool:
        return self.objects.put(KIND, response.as_object(owner, runner))

    def finish(self, response: StoredResponse, owner: str) -> bool:
        return self.objects.finish(KIND, response.as_object(owner))

    def get(self, response_id: str, owner: str) -> bytes | None:
        return self.objects.get(KIND, response_id, owner)

    def path(self, response_id: str, owner: str) -> list[StoredResponse]:
        return read_path(self.objects, response_id, owner, self._limits)

    def totals(self) -> tuple[int, int]:
        return self.objects.totals(KIND)


def opened(path: Path, *, clock: Clock | None = None, **limits: Any) -> Opened:
    changed = StoreLimits(**{name: limits.get(name, getattr(MANY, name)) for name in MANY.__slots__})
    return Opened(path, changed, clock or Clock())


def stored(name: str, parent: str | None = None, text: bytes = b"x") -> StoredResponse:
    return StoredResponse(response_id=name, parent=parent, body=b"{}", items=text)


def chain(database: Opened, names: str) -> None:
    """A conversation of responses with one-letter names."""
    for at, name in enumerate(names):
        assert database.put(stored(name, names[at - 1] if at else None), "me")


def present(database: Opened, names: str) -> str:
    return "".join(name for name in names if database.get(name, "me") is not None)


# ---------------------------------------------------------------------- the database


def test_a_path_is_read_from_its_root_and_only_by_its_owner(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite")
    chain(database, "abc")
    database.put(stored("z", "b"), "me")
    assert [one.response_id for one in database.path("c", "me")] == ["a", "b", "c"]
    assert [one.response_id for one in database.path("z", "me")] == ["a", "b", "z"]
    assert database.get("a", "you") is None
    assert not database.delete("a", "you")
    assert not database.put(stored("d", "c"), "you")
    with pytest.raises(UnknownResponseError):
        database.path("c", "you")


def test_a_backup_beside_the_server_is_of_one_moment_and_can_be_put_in_place(tmp_path: Path) -> None:
    """As ``sqlite3 FILE ".backup COPY"`` (docs/operating.md): page by page, with a response in between."""
    database, copy = opened(tmp_path / "r.sqlite"), tmp_path / "copy.sqlite"
    chain(database, "abc")
    later = iter("xyz")

    def goes_on(*_: int) -> None:
        if (name := next(later, None)) is not None:
            database.put(stored(name), "me")

    with (
        contextlib.closing(sqlite3.connect(tmp_path / "r.sqlite")) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target, pages=1, progress=goes_on)
    assert present(database, "abcxyz") == "abcxyz"
    database.close()
    back = opened(copy)
    assert present(back, "abcxyz") in ("abc", "abcx", "abcxy", "abcxyz")
    assert back.totals()[0] == len(present(back, "abcxyz")), "the counts are of the same moment"
    assert back.put(stored("d", "c"), "me")
    assert [one.response_id for one in back.path("d", "me")] == ["a", "b", "c", "d"]
    back.close()


def test_the_conversation_that_rested_longest_goes_from_its_end(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite", count=5)
    chain(database, "abc")
    chain(database, "xy")
    database.put(stored("z", "y"), "me")
    assert present(database, "abcxyz") == "abxyz"
    database.put(stored("d", "b"), "me")
    assert present(database, "abdxyz") == "abdxy", "the other one has rested longer now"
    assert database.totals()[0] == 5


def test_what_one_key_stores_takes_no_place_of_another(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite", count=6)
    for name in "abc":
        assert database.put(stored(name), "bystander")
    for number in range(20):
        assert database.put(stored(f"attack{number}"), "attacker")
    assert [name for name in "abc" if database.get(name, "bystander")] == ["a", "b", "c"]
    assert database.get("attack19", "attacker") is not None
    assert database.totals()[0] == 6


def test_bytes_of_one_key_take_no_place_of_another(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite", bytes=6000)
    assert database.put(stored("own", text=b"x" * 400), "bystander")
    for number in range(9):
        assert database.put(stored(f"attack{number}", text=b"x" * 1500), "attacker")
    assert database.get("own", "bystander") is not None
    assert database.totals()[1] <= 6000


def test_bytes_are_bounded_and_what_has_no_place_is_said(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite", bytes=4000)
    for number in range(30):
        assert database.put(stored(f"r{number}", text=b"x" * 500), "me")
        assert database.totals()[1] <= 4000
    assert not database.put(stored("large", text=b"x" * 5000), "me")
    assert database.get("large", "me") is None


def test_old_conversations_are_gone_and_continued_ones_are_not(tmp_path: Path) -> None:
    clock = Clock()
    database = opened(tmp_path / "r.sqlite", clock=clock)
    chain(database, "a")
    chain(database, "x")
    clock.now_s += 60
    database.put(stored("b", "a"), "me")
    clock.now_s += 60
    assert present(database, "abx") == "ab"
    database.put(stored("n"), "me")
    assert database.totals()[0] == 3


def test_a_deleted_response_leaves_no_text_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    database = opened(path)
    chain(database, "a")
    database.put(stored("b", "a", text=b"a secret of the client" * 50), "me")
    assert database.delete("b", "me")
    database.close()  # the log is written back and removed
    assert b"a secret" not in path.read_bytes()


def test_a_path_with_a_gap_cannot_be_continued(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite")
    chain(database, "abc")
    assert database.delete("b", "me")
    assert present(database, "abc") == "ac"
    with pytest.raises(UnknownResponseError, match="'c' continues 'b', which was deleted"):
        database.path("c", "me")


def test_long_and_large_conversations_are_refused_with_the_limit(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite", turns=4, turn_bytes=5000)
    chain(database, "abcde")
    assert len(database.path("d", "me")) == 4
    with pytest.raises(RequestError, match=r"more than 4 responses \(limits\.max_response_turns\)"):
        database.path("e", "me")
    database.put(stored("f", "a", text=b"x" * 5000), "me")
    with pytest.raises(RequestError, match=r"limit is 5000 \(limits\.max_body_mb\)"):
        database.path("f", "me")


def test_a_circle_in_a_damaged_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    database = opened(path)
    chain(database, "abc")
    with sqlite3.connect(path) as other:
        other.execute("UPDATE objects SET parent = 'c' WHERE id = 'a'")
    with pytest.raises(RequestError, match=r"limits\.max_response_turns"):
        database.path("c", "me")


def test_the_file_is_for_its_owner_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.touch(0o644)
    database = opened(path)
    chain(database, "a")
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert len(list(tmp_path.iterdir())) == 3, "the file, its log and its index"
    foreign = tmp_path / "other.sqlite"
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE t (x)")
    with pytest.raises(ConfigError, match="another program"):
        opened(foreign)
    (tmp_path / "text").write_text("no database, but some longer text " * 50)
    with pytest.raises(ConfigError, match=r"server\.response_store .*text"):
        opened(tmp_path / "text")


_OLD_TABLES = """
CREATE TABLE conversations (root TEXT PRIMARY KEY, used_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, parent TEXT, root TEXT NOT NULL,
                        depth INTEGER NOT NULL, size INTEGER NOT NULL, created_s REAL NOT NULL,
                        runner TEXT) WITHOUT ROWID;
CREATE TABLE contents (id TEXT PRIMARY KEY, body BLOB NOT NULL, items BLOB NOT NULL, vocabulary BLOB NOT NULL,
                       shared INTEGER NOT NULL, tokens BLOB NOT NULL, chars INTEGER NOT NULL,
                       digest BLOB NOT NULL);
CREATE TABLE totals (count INTEGER NOT NULL, bytes INTEGER NOT NULL);
PRAGMA application_id = 0x77656674;
"""


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_older_version_is_read_and_written(tmp_path: Path, version: int) -> None:
    path = tmp_path / "r.sqlite"
    with sqlite3.connect(path) as old:
        old.executescript(_OLD_TABLES + f"PRAGMA user_version = {version};")
        for at, (name, parent, runner) in enumerate((("b", "a", None), ("a", None, None), ("c", "b", "r"))):
            old.execute(
                "INSERT INTO responses VALUES (?, 'me', ?, 'a', ?, 600, ?, ?)",
                (name, parent, ord(name), 900.0 + ord(name), runner),
            )
            old.execute(
                "INSERT INTO contents VALUES (?, ?, ?, ?, 1, ?, 2, ?)",
                (name, b"{}", f"i{at}".encode(), b"v", b"t", b"d"),
            )
        if version == 1:
            old.execute("ALTER TABLE responses DROP COLUMN runner")
    for _ in range(2):
        database = opened(path)
        assert [(one.response_id, one.items, one.shared) for one in database.path("c", "me")] == [
            ("a", b"i1", 1),
            ("b", b"i0", 1),
            ("c", b"i2", 1),
        ]
        assert database.runner_of("c", "me") == (None if version == 1 else "r")
        database.close()


def test_what_became_of_an_unfinished_response_takes_its_place(tmp_path: Path) -> None:
    database = opened(tmp_path / "r.sqlite")
    chain(database, "ab")
    assert database.put(stored("c", "b"), "me", runner="r")
    assert (database.runner_of("b", "me"), database.runner_of("c", "me")) == (None, "r")
    assert not database.finish(stored("c", "b"), "you")
    assert database.finish(stored("c", "b", b"new" * 100), "me")
    assert not database.finish(stored("c", "b"), "me"), "it is finished"
    assert database.path("c", "me")[-1].items == b"new" * 100
    with sqlite3.connect(tmp_path / "r.sqlite") as raw:
        assert database.totals() == raw.execute("SELECT count(*), sum(size) FROM objects").fetchone()


async def test_responses_that_come_together_share_a_transaction_and_are_there_for_all(tmp_path: Path) -> None:
    store, other = (ResponseStore(tmp_path / "r.sqlite", MANY) for _ in range(2))
    store.open_now()
    database = store._database
    assert database is not None
    sizes, put_all = [], database.put_all

    def counted(kind: str, entries: Any) -> list[bool]:
        sizes.append(len(entries))
        return put_all(kind, entries)

    database.put_all = counted  # type: ignore[method-assign]
    names = [f"r{number}" for number in range(20)]
    puts = [
        store.put(lambda name=name: stored(name, "gone" if name == "r7" else None), "me")  # type: ignore[misc]
        for name in names
    ]
    assert await asyncio.gather(*puts) == [name != "r7" for name in names], "that one has no parent"
    assert sizes == [1, 19]
    assert (await other.get("r19", "me")).response_id == "r19"
    with pytest.raises(UnknownResponseError):
        await other.get("r19", "you")
    await store.close()
    await other.close()


async def test_a_transaction_that_fails_is_said_and_the_next_one_works(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.sqlite", MANY)
    assert await store.put(lambda: stored("a"), "me")
    database: Any = store._database
    put_all = database.put_all

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    database.put_all = refuse
    with pytest.raises(ResponseStoreError, match="no space left"):
        await store.put(lambda: stored("b"), "me")
    database.put_all = put_all
    assert await store.put(lambda: stored("c"), "me")
    assert [one.response_id for one in await store.path_to("a", "me")] == ["a"]
    await store.close()


async def test_a_store_that_is_closed_refuses(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.sqlite", MANY)
    assert await store.put(lambda: stored("a"), "me")
    await store.close()
    with pytest.raises(ResponseStoreError):
        await asyncio.wait_for(store.get("a", "me"), 10)
    store.close_now()


def _put_and_die(path: Path) -> None:
    async def put() -> None:
        store = ResponseStore(path, MANY)
        assert await store.put(lambda: stored("a"), "me")
        assert await store.begin(stored("b"), "me")
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(put())


async def test_a_process_that_is_killed_leaves_its_responses_and_no_runner(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    process = multiprocessing.get_context("spawn").Process(target=_put_and_die, args=(path,))
    process.start()
    await asyncio.to_thread(process.join)
    assert process.exitcode == -signal.SIGKILL
    heir = ResponseStore(path, MANY)
    assert (await heir.get("a", "me")).response_id == "a"
    assert await heir.runner_is_gone("b", "me")
    assert not await heir.runner_is_gone("a", "me"), "it is finished"
    await heir.close()


@pytest.mark.parametrize(
    "statement", ["SELECT count(*) FROM sqlite_master", "PRAGMA application_id", "PRAGMA user_version"]
)
def test_a_file_that_is_created_meanwhile_is_not_of_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """Just before ``statement`` another server creates the file, or waits for this one."""
    path = tmp_path / "r.sqlite"
    connect = sqlite3.connect
    other = threading.Thread(target=lambda: opened(path).close())

    def connected(*arguments: Any, **settings: Any) -> sqlite3.Connection:
        monkeypatch.setattr(sqlite3, "connect", connect)
        db: sqlite3.Connection = connect(*arguments, **settings)

        def trace(text: str) -> None:
            if text == statement and other.ident is None:
                other.start()
                other.join(0.5)

        db.set_trace_callback(trace)
        return db

    monkeypatch.setattr(sqlite3, "connect", connected)
    opened(path).close()
    assert other.ident is not None, "the statement ran"
    other.join()
    assert opened(path).totals() == (0, 0)


def _write(path: Path, number: int) -> None:
    database = opened(path, count=40)
    random = Random(number)
    last = None
    for turn in range(60):
        name = f"{number}-{turn}"
        if not database.put(stored(name, last), "me"):
            last = None
            continue
        last = name if random.random() < 0.8 else None
    database.close()


def test_several_processes_agree_on_one_file(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_write, args=(path, number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    database = opened(path, count=40)
    with sqlite3.connect(path) as raw:
        rows = raw.execute("SELECT id, size FROM objects").fetchall()
    assert database.totals() == (len(rows), sum(size for _, size in rows))
    assert len(rows) == 40
    for name, _ in rows:
        assert database.path(name, "me")[-1].response_id == name, "no path has a gap"


def test_a_file_that_cannot_be_opened_is_a_503_and_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    store = ResponseStore(tmp_path / "file" / "r.sqlite", MANY)
    with pytest.raises(ResponseStoreError, match=r"server\.response_store") as refusal:
        asyncio.run(store.put(lambda: stored("a"), "me"))
    assert refusal.value.status == 503
    store.close_now()
    engine = {"model": str(write_model_directory(tmp_path))}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with running_server("build", engine=engine, server={"response_store": None}) as running:
        answer = running.client().responses.create(model="scripted", input="say:well")
        assert (answer.output_text, answer.to_dict()["store"]) == ("well", False)
        assert running.get("/v1/responses/resp_a").status_code == 503


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"response_store": ""}, "server.response_store is empty"),
        ({"response_store": "/nowhere/at/all/r.sqlite"}, "in none that exists"),
        ({"response_store_size": "much"}, "limits.response_store_size"),
        ({"response_days": 0.0}, "limits.response_days"),
        ({"max_response_turns": 0}, "limits.max_response_turns"),
    ],
)
def test_a_store_that_cannot_be_is_said_before_the_start(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**settings).check()


# ---------------------------------------------------------------------- over HTTP

ENGINE: dict[str, Any] = {"memory": "32MB", "threads": 1, "max_model_len": 1024}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "responses.sqlite"


def served(path: Path, **server: Any) -> Any:
    engine = {"model": str(checkpoint("qwen3_5")), **ENGINE}
    return running_server(
        "",
        engine=engine,
        server={"response_store": str(path), "api_key": ["one", "two"], "max_response_turns": 8, **server},
    )


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    with served(path) as running:
        yield running


def of_key(server: RunningServer, key: str = "one") -> openai.OpenAI:
    return server.client(api_key=key)


def ask(server: RunningServer, text: Any, key: str = "one", *, tokens: int = 12, **more: Any) -> Any:
    return of_key(server, key).responses.create(
        model="default", input=text, max_output_tokens=tokens, temperature=0, **more
    )


def test_the_next_turn_begins_where_the_last_answer_ended(server: RunningServer) -> None:
    """The prompt and all but the last token of each answer come from the cache: that one was never fed. With
    so many tokens a request that comes before the answer has left its memory waits for it."""
    tokens = SAVED_BY_CLOSING_MIN + 1  # the last one is not computed
    last = ask(server, "What turns the mill by the river? " * 4, tokens=tokens)
    assert last.usage.input_tokens_details.cached_tokens == 0
    for question in ("And which key is red?", "Who rings the bell at noon?", "Again, slowly, please."):
        answer = ask(server, question, tokens=tokens, previous_response_id=last.id)
        ended = last.usage.input_tokens + last.usage.output_tokens - 1
        assert answer.usage.input_tokens_details.cached_tokens == ended
        last = answer


def test_a_response_is_read_listed_and_deleted_by_its_key_only(server: RunningServer) -> None:
    answer = ask(server, [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    mine, other = of_key(server).responses, of_key(server, "two").responses
    assert mine.retrieve(answer.id) == answer
    listed = mine.input_items.list(answer.id)
    ResponseItemList.model_validate(listed.to_dict(mode="json") | {"object": "list"}, strict=True)
    assert [item.content[0].text for item in listed.data] == ["two", "one"]  # type: ignore[union-attr]
    first = mine.input_items.list(answer.id, limit=1, order="asc")
    assert first.has_more
    assert [item.id for item in first] == [item.id for item in listed.data][::-1]
    for refused in (
        lambda: other.retrieve(answer.id),
        lambda: other.delete(answer.id),
        lambda: other.input_items.list(answer.id),
        lambda: other.cancel(answer.id),
        lambda: ask(server, "three", "two", previous_response_id=answer.id),
    ):
        with pytest.raises(openai.NotFoundError, match=r"there is no response 'resp_"):
            refused()
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        mine.cancel(answer.id)
    mine.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        mine.retrieve(answer.id)


def test_a_reference_is_the_item_that_it_names(server: RunningServer) -> None:
    asked, more = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    first = ask(server, [asked])
    [question], answer = of_key(server).responses.input_items.list(first.id).data, first.output[0]
    whole = ask(server, [asked, answer.to_dict(), more])
    referring = ask(server, [{"type": "item_reference", "id": question.id}, {"id": answer.id}, more])
    assert referring.usage.input_tokens == whole.usage.input_tokens
    assert referring.output_text == whole.output_text
    listed = of_key(server).responses.input_items.list(referring.id, order="asc").data
    assert [item.id for item in listed][:2] == [question.id, answer.id]
    again = ask(server, [{"type": "item_reference", "id": answer.id}, more], previous_response_id=first.id)
    assert again.usage.input_tokens > referring.usage.input_tokens
    for name, key in (
        (answer.id, "two"),
        (f"msg_{'0' * 32}o0", "one"),
        ("msg_1", "one"),
        (answer.id.replace("o0", "o1"), "one"),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no stored item") as refusal:
            ask(server, [{"type": "item_reference", "id": name}, more], key)
        assert refusal.value.param == "input[0].id"
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.id is missing"):
        ask(server, [{"type": "item_reference"}, more])


def test_what_is_not_to_be_stored_is_not(server: RunningServer) -> None:
    answer = ask(server, "a passing word", store=False)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        of_key(server).responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as refusal:
        ask(server, "more", previous_response_id=answer.id)
    assert (refusal.value.param, refusal.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_streamed_response_is_stored_before_its_last_event(server: RunningServer) -> None:
    client = of_key(server).responses
    with client.stream(model="default", input="a streamed word", max_output_tokens=4) as stream:
        for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                assert client.retrieve(event.response.id).status == event.response.status
                return
    raise AssertionError("no last event came")


def test_instructions_do_not_carry_over(server: RunningServer) -> None:
    first = ask(server, "one", instructions="Speak of rivers. " * 10)
    second = ask(server, "two", previous_response_id=first.id)
    assert second.instructions is None
    assert second.usage.input_tokens < first.usage.input_tokens + 40


def test_a_conversation_that_is_too_long_is_refused(server: RunningServer) -> None:
    last = ask(server, "go")
    for _ in range(7):
        last = ask(server, "on", previous_response_id=last.id)
    ask(server, "the eighth may be continued", previous_response_id=last.id)
    last = ask(server, "the ninth", previous_response_id=last.id)
    with pytest.raises(openai.BadRequestError, match=r"limits\.max_response_turns"):
        ask(server, "the tenth", previous_response_id=last.id)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=٣", "limit"),
        ("order=up", "order"),
        ("after=msg_none", "after"),
    ],
)
def test_a_bad_page_of_items_is_refused(server: RunningServer, query: str, param: str) -> None:
    answer = ask(server, "one")
    response = server.get(f"/v1/responses/{answer.id}/input_items?{query}", headers={"Authorization": "Bearer one"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("response_id", ["resp_none", "..", "%00", "a%2fb", "x" * 3000, "'; DROP TABLE--"])
def test_unknown_ids_are_not_found(server: RunningServer, response_id: str) -> None:
    for method in ("get", "delete"):
        response = server._http.request(
            method, f"{server.url}/v1/responses/{response_id}", headers={"Authorization": "Bearer one"}
        )
        assert response.status_code in (404, 405), response.text


def test_a_restart_and_a_second_server_have_the_responses(server: RunningServer, path: Path) -> None:
    answer = ask(server, "remember this")
    with served(path) as second:
        assert of_key(second).responses.retrieve(answer.id) == answer
        there = ask(second, "what was it?", previous_response_id=answer.id)
    here = ask(server, "and then?", previous_response_id=there.id)
    assert here.previous_response_id == there.id
    assert here.usage.input_tokens > there.usage.input_tokens


def test_without_a_store_answers_say_so(tmp_path: Path) -> None:
    with served(tmp_path, response_store="off") as bare:
        assert ask(bare, "one").to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match=r"server\.response_store off"):
            ask(bare, "one", store=True)
        with pytest.raises(openai.NotFoundError, match=r"server\.response_store off"):
            ask(bare, "one", previous_response_id="resp_x")
        with pytest.raises(openai.NotFoundError, match=r"server\.response_store off"):
            ask(bare, [{"type": "item_reference", "id": "msg_x"}])
