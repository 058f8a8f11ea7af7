"""The whole engine in virtual time with sessions: prefixes with names in memory that is short, and forks of them.
Laws are checked after each step inside ``PinnedSimulation``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.failing import assert_fails
from tests.support.pinning import PinnedSimulation
from tests.support.sharing import sharing_scenario
from weft.memory.prefix import pins as pins_module
from weft.memory.prefix.eviction import choose
from weft.memory.prefix.pins import Pins
from weft.memory.relief import Relief
from weft.memory.values import NodeId

SEEDS = [seed for seed in range(16) if seed not in (7, 13)]
"""The runs of those two take nearly half the time. In the others 56 snapshots and more stay, and prefixes are forked
600 times, for least counts of 20 and 30."""
SHARES = {0.25: 1, 0.9: 10}
"""Of memory for pinned snapshots, and the least of them that give way."""


def run_all(share: float = 0.9) -> list[PinnedSimulation]:
    simulations = []
    for seed in SEEDS:
        simulation = PinnedSimulation(sharing_scenario(seed), share)
        simulation.run()
        simulations.append(simulation)
    return simulations


@pytest.mark.parametrize("share", SHARES)
def test_every_request_ends_whatever_is_pinned(share: float) -> None:
    simulations = run_all(share)
    # Pins were there, kept something, were forked, and gave way: or these runs show nothing.
    assert sum(one.kept for one in simulations) > 20
    assert sum(one.evicted for one in simulations) >= SHARES[share]
    assert sum(one.forks for one in simulations) > 30


def test_the_same_seed_gives_the_same_trace_with_sessions() -> None:
    first, again = (PinnedSimulation(sharing_scenario(7), 0.5).run() for _ in range(2))
    assert first == again


# ---------------------------------------------------------------------- negative controls


def test_pins_that_are_never_evicted_block_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = Relief._nodes_in_use

    def spare(self: Relief) -> set[NodeId]:
        return in_use(self) | set(self._memory.cache.pins.last)

    monkeypatch.setattr(Relief, "_nodes_in_use", spare)
    assert_fails("nothing can run|idles|no end", run_all)


def test_pins_that_eviction_forgets_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, last: Any = (), **more: Any) -> Any:
        return choose(*args, **more)

    monkeypatch.setattr("weft.memory.relief.choose", forgetful)
    assert_fails("pinned snapshots went", run_all)


def test_pins_beyond_their_budget_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Pins._choose

    def greedy(self: Pins) -> None:
        budget, self.budget_bytes = self.budget_bytes, 1 << 60
        plain(self)
        self.budget_bytes = budget

    monkeypatch.setattr(Pins, "_choose", greedy)
    assert_fails("bytes of a budget", lambda: run_all(0.25))


def test_a_pin_of_a_node_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "went", lambda self, node: None)
    assert_fails("is pinned and gone", run_all)


def test_a_name_that_takes_a_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Pins.add

    def grow(self: Pins, name: str, salt: str, tokens: bytes) -> pins_module.PinnedPrefix:
        self._tree.page_count += 1
        return add(self, name, salt, tokens)

    monkeypatch.setattr(Pins, "add", grow)
    assert_fails("a name took memory", run_all)
