"""How many replicas there should be, from looks at a fleet."""

from __future__ import annotations

from typing import Any, cast

import pytest

from weft.fleet.fleet import Fleet
from weft.fleet.ray_fleet import GROW_AT_S, IDLE_S, FleetLoad, Scaler
from weft.fleet.ray_placer import PlacerOrder
from weft.server.config import ServerConfig
from weft.server.launch import placed_by_ray


def load(*, running: int = 0, waiting: int = 0, admitted: int = 0, ready: int = 1, starting: int = 0) -> FleetLoad:
    return FleetLoad(running, waiting, admitted, ready, starting, rows=4)


def test_a_queue_that_takes_long_brings_another_replica_and_one_at_a_time() -> None:
    scaler = Scaler(1, 3)
    assert scaler.look(0, load(running=4, waiting=20)) == 1
    assert scaler.look(1, load(running=4, waiting=20, admitted=1)) == 2, "20 sequences at one a second"
    assert scaler.queued_s == 20
    assert scaler.look(2, load(running=4, waiting=20, admitted=2, starting=1)) == 2
    assert scaler.look(3, load(running=8, waiting=20, admitted=3, ready=2)) == 3
    assert scaler.look(4, load(running=8, waiting=20, admitted=4, ready=3)) == 3, "the most"


def test_a_short_queue_brings_none() -> None:
    scaler = Scaler(1, 3)
    for second in range(60):
        assert scaler.look(second, load(running=4, waiting=3, admitted=10 * second)) == 1
    assert 0 < scaler.queued_s < 1


def test_a_queue_of_which_nothing_is_admitted_is_as_long_as_it_waits() -> None:
    scaler = Scaler(1, 2)
    assert scaler.look(0, load(waiting=1)) == 1
    assert scaler.look(GROW_AT_S, load(waiting=1)) == 1
    assert scaler.look(GROW_AT_S + 1, load(waiting=1)) == 2


def test_a_replica_goes_once_the_others_have_had_room_for_long() -> None:
    scaler = Scaler(1, 3)
    scaler.target = 2
    assert scaler.look(0, load(running=4, ready=2)) == 2
    assert scaler.look(IDLE_S / 2, load(running=5, ready=2)) == 2, "no room: the wait begins again"
    assert scaler.look(IDLE_S, load(ready=2)) == 2
    assert scaler.look(2 * IDLE_S, load(ready=2)) == 1
    assert scaler.look(4 * IDLE_S, load()) == 1, "the least"


@pytest.mark.parametrize("busy", [{"waiting": 1, "admitted": 5}, {"starting": 1}])
def test_a_queue_or_a_start_begins_the_wait_of_a_replica_that_may_go_again(busy: dict[str, int]) -> None:
    scaler = Scaler(1, 3)
    scaler.target = 2
    scaler.look(0, load(ready=2))
    scaler.look(IDLE_S / 2, load(ready=2, **busy))
    assert scaler.look(IDLE_S, load(ready=2)) == 2
    assert scaler.look(2 * IDLE_S, load(ready=2)) == 1


@pytest.mark.parametrize(
    ("device", "asked", "gpus"),
    [("auto", {}, 0), ("cuda", {}, 2), ("cuda", {"ray_gpus": 0.5}, 1), ("cuda", {"ray_gpus": 0}, 0)],
)
def test_ranks_on_a_gpu_get_one_each_unless_another_share_is_set(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: dict[str, Any], gpus: float
) -> None:
    orders: list[PlacerOrder] = []
    monkeypatch.setattr("weft.fleet.ray_fleet.RayFleet", lambda fleet, order, *range: orders.append(order))
    config = ServerConfig(ray="auto", ray_cpus=4, **asked)
    placed_by_ray(config, cast(Fleet, None), ("0.0.0.0:0", "token"), ranks=2, device=device)
    assert (orders[0].cpus, orders[0].gpus) == (8, gpus)
