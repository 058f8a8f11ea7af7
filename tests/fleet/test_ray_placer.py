"""The placer of Ray and the server's end of it, with a cluster and a process that are played."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from weft.fleet.fleet import Fleet
from weft.fleet.ray_fleet import RayFleet
from weft.fleet.ray_placer import Placer, PlacerOrder

ORDER = PlacerOrder("auto", "10.0.0.1:", "token", {}, 2.0, 1.0)


class Cluster:
    """The part of ``ray`` that a placer uses. ``done``: watches of members that have ended."""

    def __init__(self) -> None:
        self.placed: list[Any] = []
        self.removed: list[object] = []
        self.done: set[object] = set()
        self.left: list[object] = []
        self.exceptions = SimpleNamespace(RayError=ConnectionError)

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._actor))

    def _actor(self, order: dict[str, Any]) -> Any:
        watch, number = object(), len(self.placed)
        leave = SimpleNamespace(remote=lambda: self.left.append(number))
        actor = SimpleNamespace(watch=SimpleNamespace(remote=lambda: watch), leave=leave, number=number)
        self.placed.append(watch)
        return actor

    def wait(self, waited: list[object], timeout: float) -> tuple[list[object], list[object]]:
        return [one for one in waited if one in self.done or one == "ready"], []

    def get(self, watch: object) -> int:
        return 0

    def kill(self, actor: Any) -> None:
        self.removed.append(actor.number)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    group: Any = ModuleType("ray.util.placement_group")
    group.placement_group = lambda bundles, strategy: SimpleNamespace(ready=lambda: "ready")
    group.remove_placement_group = lambda group: None
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda **fields: None
    for module in (ModuleType("ray"), ModuleType("ray.util"), group, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Cluster()


def test_a_member_that_ends_is_replaced_after_a_pause_and_one_that_leaves_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("weft.fleet.ray_placer.time.sleep", pauses.append)
    placer = Placer(cluster, ORDER)
    placer.reconcile(2)
    assert len(cluster.placed) == 2
    cluster.done.add(cluster.placed[0])
    placer.reconcile(2)
    assert (len(cluster.placed), cluster.removed, len(pauses)) == (3, [0], 1)
    placer.reconcile(1)
    assert (cluster.left, cluster.removed) == ([2], [0]), "it drains"
    cluster.done.add(cluster.placed[2])
    placer.reconcile(1)
    assert (len(cluster.placed), cluster.removed) == (3, [0, 2])
    assert len(pauses) == 1, "it was told to leave"


async def test_the_placer_gets_its_order_and_each_target_and_its_lines_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[Any] = []
    lines = asyncio.StreamReader()
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stdin = SimpleNamespace(write=lambda data: written.append(json.loads(data)), close=lambda: ended.set_result(0))
    process = SimpleNamespace(stdin=stdin, stdout=lines, returncode=None, wait=lambda: ended)

    async def begun(*command: str, **options: object) -> Any:
        return process

    monkeypatch.setattr("asyncio.create_subprocess_exec", begun)
    monkeypatch.setattr(logging.getLogger("weft.server"), "propagate", True)
    caplog.set_level(logging.INFO)
    fleet = cast(Fleet, SimpleNamespace(joined=SimpleNamespace(port=7000)))
    placed = RayFleet(fleet, ORDER, 2, 3)
    placed.start()
    lines.feed_data(b"connected\n")
    for _ in range(100):
        await asyncio.sleep(0)
    assert written == [
        {"address": "auto", "server": "10.0.0.1:7000", "token": "token", "own": {}, "cpus": 2.0, "gpus": 1.0},
        {"target": 2},
    ]
    assert "ray: connected" in caplog.text
    await placed.stop()
    assert ended.done()
