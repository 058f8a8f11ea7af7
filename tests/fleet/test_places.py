"""Parts of a machine for its replicas."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.fleet.fleet import _alike, _recording
from weft.fleet.places import (
    divide_cores,
    divide_machine,
    driver_gpus,
    start_at_once,
    usable_core_numbers,
    visible_gpus,
)
from weft.rpc.messages import HostShare, RecordingTarget


def test_cores_are_divided_without_rest_and_neighbours_stay_together() -> None:
    assert divide_cores(range(12), 3) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert divide_cores([0, 2, 4, 6, 8], 2) == [(0, 2, 4), (6, 8)]
    assert divide_cores([5], 3) == [(), (), ()]


def test_one_replica_gets_the_machine_and_several_get_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [whole] = divide_machine(EngineConfig(), 1)
    assert (whole.cores, whole.ram_share) == ((), 1)
    parts = divide_machine(EngineConfig(), 2)
    assert [part.ram_share for part in parts] == [2, 2]
    cores = [core for part in parts for core in part.cores]
    assert cores in ([], usable_core_numbers())


def test_each_replica_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert [dict(place.environment) for place in divide_machine(EngineConfig(), 2)] == [
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"CUDA_VISIBLE_DEVICES": "5"},
    ]
    with pytest.raises(ConfigError, match=r"--replicas is 3.*GPUs 3, 5.*--device cpu"):
        divide_machine(EngineConfig(), 3)
    assert len(divide_machine(EngineConfig(device="cpu"), 3)) == 3
    with pytest.raises(ConfigError, match="--device cuda:1"):
        divide_machine(EngineConfig(device="cuda:1"), 2)


class Driver:
    """CUDA's, as far as it is asked. ``error``: of ``cuInit``."""

    def __init__(self, count: int, error: int = 0) -> None:
        self._count, self._error = count, error

    def cuInit(self, flags: int) -> int:
        return self._error

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._count
        return 0


def test_without_a_list_the_gpus_are_those_that_the_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with the machine's cards 2 and 3 has /dev/nvidia2 and /dev/nvidia3, which CUDA calls 0 and 1. WSL
    has none of these files."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for driver, gpus in ((Driver(2), ["0", "1"]), (Driver(2, error=100), [])):
        driver_gpus.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda name, driver=driver: driver)
        assert visible_gpus() == gpus
    driver_gpus.cache_clear()
    monkeypatch.undo()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == [], "a machine without a driver"
    driver_gpus.cache_clear()


def test_engines_with_cores_of_their_own_start_at_once() -> None:
    two = [HostShare((0,), 2), HostShare((1,), 2)]
    assert start_at_once(EngineConfig(), two)
    assert not start_at_once(EngineConfig(), [HostShare((), 2), HostShare((), 2)])
    assert not start_at_once(EngineConfig(weights_cache="/packed"), two), "the second maps it"


MEASURES = """
import sys
from weft.host import free_ram_bytes, end_memory_turn, use_part_of_host
use_part_of_host((), 2, int(sys.argv[1]))
print(free_ram_bytes(), flush=True)
sys.stdin.readline()
end_memory_turn()
print("taken", flush=True)
sys.stdin.readline()
"""


def test_engines_choose_their_memory_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first, second = divide_machine(EngineConfig(), 2)
    turn = first.memory_turn
    assert turn is not None
    assert turn == second.memory_turn
    with subprocess.Popen(
        [sys.executable, "-c", MEASURES, str(turn)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(turn,),
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert int(engine.stdout.readline()) > 0
        with pytest.raises(BlockingIOError):
            fcntl.lockf(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert engine.stdout.readline() == "taken\n"
        fcntl.lockf(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(turn)


def test_replicas_that_hand_prompts_over_have_as_many_threads_each() -> None:
    """Records of another number of threads have other bits."""
    uneven = [HostShare(cores=(0, 1, 2)), HostShare(cores=(3, 4))]
    assert _alike(EngineConfig(), uneven).threads == 2
    assert _alike(EngineConfig(threads=3), uneven).threads == 3, "what was asked for"
    assert _alike(EngineConfig(), [HostShare(cores=(0, 1)), HostShare(cores=(2, 3))]).threads is None
    assert _alike(EngineConfig(), uneven).handoffs


def test_each_engine_process_records_to_a_file_of_its_own_and_the_first_to_the_name_that_was_asked_for() -> None:
    target = RecordingTarget("/r/trace.jsonl", 100, has_tokens=False)
    assert _recording(None, 1, 1) is None
    names = [Path(_recording(target, replica, start).file).name for replica in range(2) for start in range(2)]  # type: ignore[union-attr]
    assert names[0] == "trace.jsonl"
    assert len(set(names)) == 4
    assert names[3] == "trace.engine1.1.jsonl"
