"""The soak, in small: `python -m benchmarks.soak --requests 10000` is the long one."""

from __future__ import annotations

import pytest

from benchmarks.soak import long_scenario, scenarios, soak
from tests.support.simulator import SimulationFailed
from weft.memory.transaction import Transaction


def test_a_soak_ends_with_every_law_kept_and_meets_what_it_is_for() -> None:
    total = soak(3, 100, quiet=True)
    assert total["requests"] >= 100
    for name in (
        "hits",
        "taps",
        "preemptions",
        "evicted_pages",
        "prefix_waits",
        "ended by length",
        "ended by cancelled",
    ):
        assert total[name] > 0, name


def test_the_same_soak_goes_the_same_way() -> None:
    digests: list[list[str]] = [[], []]
    sums = [soak(5, 12, quiet=True, trace=found.append) for found in digests]
    assert sums[0] == sums[1]
    assert digests[0] == digests[1]


def test_a_soak_has_the_requests_it_was_asked_for_and_each_scenario_alone_is_found_by_its_seed() -> None:
    whole = list(scenarios(4, 300))
    assert 300 <= sum(len(one.arrivals) for one in whole) < 300 + 40
    assert len(whole[0].arrivals) == 150
    assert whole[0] == long_scenario(whole[0].seed, 150)
    smallest = min(whole, key=lambda one: len(one.arrivals))
    alone = soak(4, 300, only=smallest.seed, quiet=True)
    assert alone["requests"] == len(smallest.arrivals)


def test_a_soak_over_a_broken_engine_fails_and_names_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transaction, "reclaim", lambda self, **asked: False)
    with pytest.raises(SimulationFailed, match=r"^seed \d+: "):
        soak(3, 240, quiet=True)
