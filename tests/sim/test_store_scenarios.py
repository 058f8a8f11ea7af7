"""The whole engine in virtual time with a store that is slow, loses, damages, refuses and reorders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from random import Random

import pytest

from tests.fixtures.memory_store import Contents, MemoryStore
from tests.support.sharing import sharing_scenario
from tests.support.simulator import Outcome, Simulation, SimulationFailed
from weft.memory.prefix_store import TransferBuffers
from weft.units import BufferId

SEEDS = range(4)


def unreliable(seed: int, contents: Contents) -> MemoryStore:
    chance = Random(seed)
    return MemoryStore(
        contents,
        delay=lambda: chance.choice((1, 1, 2, 9, 40)),
        reorder=seed,
        fault=lambda: chance.choice((None, None, None, "damaged", "missing")),
        refuses=lambda: chance.random() < 0.2,
    )


def run(seed: int, store: Callable[[int, Contents], MemoryStore] = unreliable) -> list[Outcome]:
    """A life that fills the store, and the same requests after a restart."""
    scenario = replace(sharing_scenario(seed), fail_in_step=None)
    contents = Contents(scenario.arena.page_bytes)
    buffer_bytes = 1 << Random(seed).choice((14, 22))
    return [
        Simulation(scenario, store=store(seed + life, contents), buffer_bytes=buffer_bytes).run() for life in range(2)
    ]


def run_all(store: Callable[[int, Contents], MemoryStore]) -> Counter[str]:
    total = Counter[str]()
    for seed in SEEDS:
        for outcome in run(seed, store):
            total.update({name: value for name, value in asdict(outcome).items() if isinstance(value, int)})
    return total


def test_the_laws_hold_with_a_store_that_fails() -> None:
    total = run_all(unreliable)
    for name, at_least in (("restores", 5), ("written", 30), ("evicted_pages", 100), ("hits", 15)):
        assert total[name] >= at_least, f"{name}: {total[name]}"


def test_the_same_seed_gives_the_same_trace_with_a_store() -> None:
    assert run(3) == run(3)


def lying(seed: int, contents: Contents) -> MemoryStore:
    return MemoryStore(contents, fault=lambda: "lies")


def test_wrong_bytes_that_are_called_right_break_a_law() -> None:
    """The control: what a restored state holds is compared where a run reads it."""
    with pytest.raises(SimulationFailed, match="holds no state"):
        run_all(lying)


def test_a_buffer_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the count of transfer buffers."""
    freed = [0]

    def free(buffers: TransferBuffers, buffer: BufferId) -> None:
        freed[0] += 1
        if freed[0] != 3:
            original(buffers, buffer)

    original = TransferBuffers.free
    monkeypatch.setattr(TransferBuffers, "free", free)
    with pytest.raises(SimulationFailed, match="transfer buffers were left over"):
        run_all(unreliable)
