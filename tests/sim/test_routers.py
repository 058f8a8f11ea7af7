"""Routers that look at no cache."""

from __future__ import annotations

from collections import Counter

import pytest

from weft.errors import ConfigError
from weft.router import choice
from weft.router.protocol import LeastLoaded, ReplicaLoad, RoutedRequest
from weft_tools.sim.routers import ROUTERS, PrefixHash, RoundRobin, make_router

REQUEST = RoutedRequest("a", [1, 2, 3])


def idle(*replicas: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(replica, 0, 0, rows=8) for replica in replicas]


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([(0, 3, 10), (1, 2, 900)], 1),  # sequences before tokens
        ([(0, 2, 500), (1, 2, 400)], 1),  # then tokens
        ([(1, 2, 400), (4, 2, 400)], 1),  # then the number
        ([(3, 0, 0)], 3),
    ],
)
def test_the_replica_with_the_least_in_flight_is_chosen(loads: list[tuple[int, int, int]], chosen: int) -> None:
    candidates = [ReplicaLoad(replica, sequences, tokens, rows=8) for replica, sequences, tokens in loads]
    assert LeastLoaded().choose(REQUEST, candidates).replica == chosen


def test_round_robin_takes_the_next_replica_that_serves() -> None:
    router = RoundRobin()
    chosen = []
    for candidates in (idle(0, 1, 2), idle(0, 1, 2), idle(0, 2), idle(0, 1), idle(0, 1)):
        choice = router.choose(REQUEST, candidates)
        assert router.choose(REQUEST, candidates) == choice, "a choice changes nothing"
        router.placed(REQUEST, choice)
        chosen.append(choice.replica)
    assert chosen == [0, 1, 2, 0, 1]


def prompt(number: int) -> RoutedRequest:
    return RoutedRequest(str(number), [number] * 64)


def test_equal_beginnings_go_to_one_replica_and_others_spread() -> None:
    router = PrefixHash()
    chosen = [router.choose(prompt(number), idle(0, 1, 2, 3)).replica for number in range(400)]
    again = [router.choose(prompt(number), idle(0, 1, 2, 3)).replica for number in range(400)]
    assert chosen == again
    assert min(Counter(chosen).values()) > 60


def test_a_replica_that_leaves_moves_only_its_own_prefixes() -> None:
    router = PrefixHash()
    for number in range(100):
        before = router.choose(prompt(number), idle(0, 1, 2, 3)).replica
        after = router.choose(prompt(number), idle(0, 1, 3)).replica
        assert after == before or before == 2


def test_a_prefix_that_all_prompts_have_spreads_by_load() -> None:
    router = PrefixHash()
    counts = [0, 0, 0]
    for _ in range(90):
        loads = [ReplicaLoad(replica, count, 0, rows=8) for replica, count in enumerate(counts)]
        counts[router.choose(prompt(7), loads).replica] += 1
    assert max(counts) <= 1.3 * 30


def test_routers_by_name() -> None:
    assert {make_router(name, lambda: 0.0).wants for name in ROUTERS} == {"nothing", "states", "pages"}
    for make, last in ((make_router, "round-robin$"), (choice.make_router, "least-loaded$")):
        with pytest.raises(ConfigError, match=f"there are seconds, kv-only.*{last}"):
            make("fastest", lambda: 0.0)
