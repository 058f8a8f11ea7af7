"""Two versions side by side: the old server ends its streams, the new one answers, mixes are refused."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet.test_join import free_port, joining, states
from tests.fleet.test_join import sung as sung_at_joined
from tests.server.running import RunningServer, eventually, running_server, server_ended, started_again
from weft.version import weft_version

NEXT = "99.0"


@pytest.fixture(scope="module")
def next_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the weft behind it one of the next version."""
    folder = tmp_path_factory.mktemp("next")
    info = folder / f"weft-{NEXT}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: weft\nVersion: {NEXT}\n")
    return folder


def settings(token: Path) -> dict[str, object]:
    return {"replicas": "1", "token": str(token), "listen_engines": f"127.0.0.1:{free_port()}", "drain_timeout": 60.0}


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "token"


@pytest.fixture(scope="module")
def olds(model_directory: Path, token: Path) -> Iterator[Callable[[], RunningServer]]:
    engine = {"model": str(model_directory)}
    with started_again(
        lambda: running_server("build_paced", engine=engine, server=settings(token)), server_ended
    ) as current:
        yield current


@pytest.fixture
def old(olds: Callable[[], RunningServer]) -> RunningServer:
    return olds()


@pytest.fixture(scope="module")
def new(
    model_directory: Path, olds: Callable[[], RunningServer], token: Path, next_version: Path
) -> Iterator[RunningServer]:
    olds()  # writes the token
    with running_server(
        "build_paced", engine={"model": str(model_directory)}, server=settings(token), path=(next_version,)
    ) as running:
        yield running


def joining_port(server: RunningServer) -> int:
    return int(server.output.split("weft join HOST:")[1].split()[0].rstrip(";,."))


def left(machine: subprocess.Popen[str]) -> str:
    """What `weft join` said when it ended."""
    output, _ = machine.communicate(timeout=60)
    assert machine.returncode == 2, output
    return output


async def test_a_machine_of_another_version_is_refused_by_name_while_streams_go_on(
    old: RunningServer, new: RunningServer, token: Path
) -> None:
    own = weft_version()
    undisturbed = await sung_at_joined(old, 2)
    singing = asyncio.create_task(sung_at_joined(old, 2))
    with joining(joining_port(new), token) as machine:  # an old machine at the new server
        said = await asyncio.to_thread(left, machine)
    assert f"runs weft {own}" in said
    assert f"this server runs weft {NEXT}" in said
    assert "all machines of a fleet need one version" in said
    assert states(new) == {0: "ready"}
    assert await singing == undisturbed


async def test_the_old_server_ends_its_streams_and_the_new_one_answers(old: RunningServer, new: RunningServer) -> None:
    undisturbed = await sung_at_joined(old, 4)
    singing = asyncio.create_task(sung_at_joined(old, 4))
    assert await asyncio.to_thread(eventually, lambda: old.running() == 4)
    old.process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    assert await sung_at_joined(new, 1) == undisturbed[:1]
    with pytest.raises((httpx.TransportError, httpx.HTTPStatusError)):  # refused, reset or a 503, as it comes
        httpx.post(f"{old.url}/v1/completions", json={"prompt": "say:late"}).raise_for_status()
    assert await singing == undisturbed, f"cut {time.monotonic() - began_s:.1f} s behind SIGTERM"
    assert await asyncio.to_thread(old.exit_code) == 0
