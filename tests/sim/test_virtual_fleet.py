"""Fleet, replicas, placement and router in virtual time, under faults: `python -m benchmarks.fleet_million`
is the long run."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.fleet_million import simulate
from tests.support.virtual_fleet import FAULTS, MUTANTS, LawBroken, World, mutant


def small(seed: int) -> World:
    """Every second one has roles."""
    return World(seed=seed, requests=300, replicas=12, own=7, fault_every=12, roles=seed % 2 == 1)


def several(seeds: int) -> Counter[str]:
    total = Counter[str]()
    for seed in range(seeds):
        total.update(small(seed).run())
    return total


def test_no_request_is_lost_or_answered_twice_whatever_fails() -> None:
    total = several(4)
    assert total["requests"] == 1200
    assert all(total[f"fault: {kind}"] for kind in FAULTS), total
    assert total["answered"] > 1000
    assert total["ended: engines died under it"] <= total["fault: poison"] + 12
    assert min(total["reports lost"], total["left"], total["handoffs"], total["handoffs that failed"]) > 0


def test_a_seed_is_one_run() -> None:
    assert small(7).run() == small(7).run() != small(8).run()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fleet_that_breaks_a_law_is_found_with_its_seed(name: str) -> None:
    with mutant(name), pytest.raises(LawBroken, match=r"^seed \d: "):
        several(5)


def test_the_command_adds_seeds_up_and_names_the_slowest() -> None:
    result = simulate(120, 10, [3, 4], 1)
    assert (result["requests"], result["laws_broken"]) == (120, [])
    assert result["slowest_seed"] in (3, 4)
