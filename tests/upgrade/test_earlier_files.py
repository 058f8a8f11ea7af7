"""Files that an earlier commit wrote (tests/data/upgrade/COMMIT.tar.xz) are read, and nothing of them is lost.

    store/               prefixes of the tiny LFM2 of tests/fixtures, in float32, with torch alone
    responses.sqlite     two responses of the embedded model, the second over the first
    hello.msgpack        what a joined machine says first

``make upgrade`` walks both directions with real processes; here one direction is cheap enough for every run.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.rules import ROOT
from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.store_life import answer
from tests.server.running import RunningServer, running_server
from weft.assemble import assemble
from weft.cli.main import main
from weft.config import EngineConfig
from weft.rpc import link
from weft.rpc.listener import refusal_of
from weft.version import weft_version

ARCHIVES = sorted((ROOT / "tests" / "data" / "upgrade").glob("*.tar.xz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.split(".")[0])
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder)
    return folder


def verified(store: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Return how many records are whole. Raises AssertionError where one is damaged."""
    assert main(["store", "verify", str(store)]) == 0
    said = capsys.readouterr().out
    assert "every checksum is right" in said
    return int(said.split()[0])


def test_a_store_is_read_and_written_and_keeps_every_record(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = earlier / "store"
    assert verified(store, capsys) == 4
    config = EngineConfig(
        model=str(checkpoint("lfm2")), memory="64MiB", device="cpu", dtype="bfloat16", threads=1, max_model_len=1024,
        store=str(store), store_size="64MiB", store_reserve="1MiB",
    )  # fmt: skip
    built = assemble(config)
    answer(built.core, 0)
    built.core.close()
    assert verified(store, capsys) > 4, "this version wrote its own beside those"


@pytest.fixture(scope="module")
def server(earlier: Path) -> Iterator[RunningServer]:
    settings = {"response_store": str(earlier / "responses.sqlite")}
    with running_server("", engine={"memory": "64MiB"}, server=settings) as running:
        yield running


def test_a_stored_response_is_read_and_continued(server: RunningServer) -> None:
    [last, first] = [
        server.get(f"/v1/responses/{name}").json()
        for name in ("resp_eea3cfd3d22c4d7cb8ece600c185cd30", "resp_40799e6eb1b27ebee167543888933ef5")
    ]
    assert first["metadata"] == {"of": "an earlier version"}
    assert last["previous_response_id"] == first["id"]
    assert last["output"][0]["content"][0]["text"] == "Oshan: 7750"
    more = {"model": "default", "input": "What is the number of Oshan?", "previous_response_id": last["id"]}
    said = server.post("/v1/responses", {**more, "temperature": 0, "max_output_tokens": 16}).json()
    assert said["output"][0]["content"][0]["text"] == "Oshan: 7750", "it still knows the list of the first turn"
    assert server.get(f"/v1/responses/{said['id']}").status_code == 200


def test_a_machine_of_an_earlier_version_is_refused_by_name(earlier: Path) -> None:
    hello = link.decode((earlier / "hello.msgpack").read_bytes())
    assert isinstance(hello, link.Hello)
    said = refusal_of(hello)
    assert said is not None
    assert f"gpu1 runs weft {hello.weft_version} (link 3)" in said
    assert f"this server runs weft {weft_version()} (link {link.LINK_VERSION})" in said


def test_there_is_an_earlier_version() -> None:
    assert ARCHIVES
