"""What a rank's death, silence, or difference does: one clear line, at once or within limits.rank_timeout."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.ranks.engines import CONFIG, GREEDY, Story, engine, prompt, run
from weft.assemble import ranks as ranks_of_engine
from weft.assemble.ranks import StartedRanks, start_ranks
from weft.assemble.room import ArenaRoom, measured_gpu_room
from weft.assemble.weights import WeightsSource
from weft.config import EngineConfig
from weft.errors import ConfigError, RankLostError
from weft.ranks.messages import RankLaunch
from weft.ranks.peers import Peer, Peers
from weft.runner import reserve
from weft.tensor import device
from weft.tensor.collectives import GroupCollectives
from weft.tensor.device import DeviceTimeoutError, wait_for, watch_while_waiting

CPU = torch.device("cpu")
ONE = {"a": (prompt(30, 1), GREEDY)}


def test_a_killed_rank_ends_the_engine_with_one_line() -> None:
    peers = Peers(2, 30.0)
    assembled = engine(checkpoint("qwen3_5"), peers=peers)
    run(assembled, ONE, Story())
    peers.ranks[0].process.kill()
    with pytest.raises(RankLostError, match=r"^rank 1 was ended by SIGKILL; the system may have run out of memory$"):
        run(assembled, ONE, Story())
    assembled.core.close()
    peers.close()


def test_a_rank_that_hangs_is_noticed_in_time() -> None:
    peers = Peers(2, 1.5)
    assembled = engine(checkpoint("qwen3_5"), peers=peers, rank_timeout=1.5)
    run(assembled, ONE, Story())
    os.kill(peers.ranks[0].process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(RankLostError, match=r"has not answered for 1\.5 s \(limits\.rank_timeout\)"):
        run(assembled, ONE, Story())
    assert time.monotonic() - began_s < 60.0, "torch's own timeouts are half an hour"
    os.kill(peers.ranks[0].process.pid, signal.SIGCONT)
    assembled.core.close()
    peers.close()
    assert peers.ranks[0].process.poll() is not None


def _loaded(two: Peers, config: EngineConfig, directory: Path) -> tuple[StartedRanks, Any]:
    ranks = start_ranks(config, directory, CPU, lambda line: None, two)
    return ranks, WeightsSource(config, "", directory).load(CPU, ranks.group)


def test_other_weights_on_a_rank_are_refused(two: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes are the same, the numbers are not."""
    from tests.fixtures.checkpoints import make_checkpoint

    own = checkpoint("lfm2")
    other = make_checkpoint(own.parent / "lfm2-other-seed", "lfm2", seed=5)
    launch = Peers.launch
    monkeypatch.setattr(Peers, "launch", lambda peers, config, _, **more: launch(peers, config, [own, other], **more))
    ranks, loaded = _loaded(two, EngineConfig(model=str(own), tp=2, threads=1), own)
    with pytest.raises(ConfigError, match=r"rank 1 differs from rank 0 in weights [0-9a-f]{12}, rank 0 has"):
        ranks.await_loaded(loaded)
    two.free()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dtype", "dtype bfloat16, rank 0 has float32"),
        ("version", r"version [0-9.]+\S*, rank 0 has 0\.0\.1"),
        ("quantize", "quantize int8, rank 0 has none"),
    ],
)
def test_another_dtype_version_or_form_on_a_rank_is_refused(
    what: str, said: str, two: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = checkpoint("lfm2")
    send, settings = Peers._send, ranks_of_engine.settings_of
    other: dict[str, dict[str, Any]] = {"dtype": {"dtype": "bfloat16"}, "quantize": {"quantize": "int8"}}

    def changed(peers: Peers, peer: Peer, message: object) -> None:
        if isinstance(message, RankLaunch):
            message = replace(message, config=replace(message.config, **other.get(what, {})))
        send(peers, peer, message)

    def of_rank_0(config: EngineConfig) -> list[tuple[str, str]]:
        known = dict(settings(config))
        return list(({**known, "version": "0.0.1"} if what == "version" else known).items())

    monkeypatch.setattr(Peers, "_send", changed)
    monkeypatch.setattr(ranks_of_engine, "settings_of", of_rank_0)
    ranks, loaded = _loaded(two, EngineConfig(model=str(own), tp=2, threads=1), own)
    with pytest.raises(ConfigError, match=f"rank 1 differs from rank 0 in .*{said}"):
        ranks.await_loaded(loaded)
    two.free()


def test_a_taken_port_keeps_no_rank_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet in a folder. The port that torch's own rendezvous would take is in use here."""
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(2) as threads:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))

        def meet(rank: int) -> list[int]:
            group = GroupCollectives.open(tmp_path, rank, 2, CPU, 30.0)
            return [int(one) for one in group.gather(torch.tensor([rank + 5]))]

        assert list(threads.map(meet, range(2))) == [[5, 6], [5, 6]]


def test_too_little_memory_on_one_rank_is_said(two: Peers) -> None:
    from weft.memory.frames.plan import fit_sizes, plan_arena

    own = checkpoint("lfm2")
    config = EngineConfig(model=str(own), tp=2, threads=1, max_model_len=512)
    ranks, loaded = _loaded(two, config, own)
    ranks.await_loaded(loaded)
    ranks.common_room(ArenaRoom(1 << 20, 1 << 20, ""))
    arena = plan_arena(loaded.spec, 8 << 30)
    pid = two.ranks[0].process.pid
    resource.prlimit(pid, resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
    two.lay_out(arena, fit_sizes(config, loaded.spec, arena))
    with pytest.raises(ConfigError, match=r"^rank 1: an arena of 8\.0\d* GiB cannot be allocated"):
        two.ready()
    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_config_of_these_tests_has_a_bound() -> None:
    """A rank that hangs in another test ends it."""
    assert CONFIG.rank_timeout <= 30


STUCK = """
import time, sys
from weft.assemble.rank_process import main
main(int(sys.argv[1]), lambda launch, connection: time.sleep(10_000))
"""


def test_a_rank_inside_of_a_collective_that_never_ends_ends_with_rank_0() -> None:
    """On a GPU it asks nobody: a kernel of NCCL spins."""
    own, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", STUCK, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    connection: Connection[Any, Any] = Connection(os.dup(own.fileno()))
    connection.send("a launch")
    connection.close()
    own.close()
    assert process.wait(60.0) == 0


class Unconnected:
    """A group of NCCL whose other rank is gone: its first collective connects, without a deadline."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _allgather_base(self, output: object, own: object) -> None:
        threading.Event().wait()


def test_a_group_of_nccl_that_does_not_connect_is_an_error() -> None:
    group: Any = Unconnected()
    with pytest.raises(RuntimeError, match=r"a rank did not connect in 0\.1 s"):
        GroupCollectives(group, CPU).connect(0.1)


def test_a_wait_for_the_device_ends_with_a_rank_that_ended() -> None:
    """A recorded collective of a rank that is gone never ends, and NCCL's own watch does not see it."""
    peers = Peers(2, 30.0)
    asked: list[bool] = []

    class Never:
        def query(self) -> bool:
            if not asked:
                peers.ranks[0].process.kill()
            asked.append(True)
            return False

    peers.end_watch = watch_while_waiting(peers.check_alive)
    with pytest.raises(RankLostError, match=r"^rank 1 was ended by SIGKILL; the system may have run out of memory$"):
        wait_for(Never())
    peers.close()
    with pytest.raises(DeviceTimeoutError):  # the control: nobody watches any more
        wait_for(Never(), deadline_s=0.5)


def test_a_step_that_does_not_fit_on_one_of_several_ranks_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are inside of a collective: a shorter step would gather other sizes than theirs."""
    measured: list[object] = []

    def measure(*_: object, **sizes: object) -> None:
        measured.append(sizes["step_tokens"])
        raise torch.OutOfMemoryError

    monkeypatch.setattr(reserve, "measure_reserve", measure)
    monkeypatch.setattr(reserve, "CudaMeter", lambda device: None)
    monkeypatch.setattr(device, "free_bytes", lambda _: 5 << 30)
    loaded: Any = SimpleNamespace(model=None, weights_bytes=1 << 30)
    spec: Any = SimpleNamespace(max_positions=4096)
    with pytest.raises(RankLostError, match=r"a step of 8192 tokens .* lower --max-num-batched-tokens"):
        measured_gpu_room(EngineConfig(tp=2), loaded, spec, "float32", torch.device("cuda"), None, lambda line: None)
    assert measured == [8192]
