"""NUMA nodes of machines that are not here, by a tree of /sys, and the memory policy of this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft import host, numa
from weft.fleet import places
from weft.numa import NumaNode, core_numbers, nodes


def machine(root: Path, **cpulists: str) -> Path:
    for name, text in cpulists.items():
        (root / name).mkdir()
        (root / name / "cpulist").write_text(text + "\n")
    return root


def test_lists_of_cores_are_read() -> None:
    assert core_numbers("0-2,8\n") == [0, 1, 2, 8]
    assert core_numbers("") == []


def test_nodes_have_the_cores_that_this_process_may_use(tmp_path: Path) -> None:
    root = machine(tmp_path, node0="0-3,16-19", node1="4-7,20-23", node2="", node10="8-11")
    every = nodes(range(24), root)
    assert [node.number for node in every] == [0, 1, 10]
    assert every[1] == NumaNode(1, (4, 5, 6, 7, 20, 21, 22, 23))
    assert nodes([3, 4], root) == [NumaNode(0, (3,)), NumaNode(1, (4,))]
    assert nodes([3], root) == [NumaNode(0, (3,))]
    assert nodes(range(24), tmp_path / "nothing") == []


def test_replicas_have_the_cores_of_whole_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, node0="0,2,4,6", node1="1,3,5,7")
    monkeypatch.setattr(places, "nodes", lambda: nodes(range(8), root))
    monkeypatch.setattr(places.os, "sched_getaffinity", lambda process: set(range(8)))
    assert places.divide_cores(places.usable_core_numbers(), 2) == [(0, 2, 4, 6), (1, 3, 5, 7)]


@pytest.mark.parametrize(("count", "wanted"), [(1, []), (2, [(0, 1)])])
def test_an_engine_over_several_nodes_interleaves(
    monkeypatch: pytest.MonkeyPatch, count: int, wanted: list[tuple[int, ...]]
) -> None:
    over, asked = [NumaNode(number, (number,)) for number in range(count)], []

    def interleave(nodes: list[NumaNode]) -> str:
        asked.append(tuple(node.number for node in nodes))
        return ""

    monkeypatch.setattr(host, "nodes", lambda: over)
    monkeypatch.setattr(host, "interleave", interleave)
    host.use_part_of_host((), 1)
    assert asked == wanted


def test_a_refused_policy_is_said_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "nodes", lambda: [NumaNode(0, (0,)), NumaNode(1, (1,))])
    monkeypatch.setattr(host, "interleave", lambda nodes: "Operation not permitted")
    host.use_part_of_host((), 1)
    [said] = caplog.messages
    assert "2 NUMA nodes" in said
    assert "(Operation not permitted)" in said
    assert "--replicas 2" in said


def test_the_kernel_takes_the_policy_or_says_why_not() -> None:
    """The pages of a child on node 0 in turn, which every machine has; a container may forbid it."""
    code = (
        "from weft.numa import NumaNode, interleave\n"
        "reason = interleave([NumaNode(0, (0,))])\n"
        "maps = '' if reason else open('/proc/self/numa_maps').read()\n"
        "print(reason or ('interleave' in maps and 'interleave:0' in maps))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() in ("True", "Operation not permitted", "Function not implemented"), said


def test_a_node_beyond_the_machine_is_refused_by_the_kernel() -> None:
    reason = numa.interleave([NumaNode(700, (0,))])
    assert reason, "a mask of several words reaches the kernel"
