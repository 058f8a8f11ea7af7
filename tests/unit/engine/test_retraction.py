"""All that runs gives up its memory, and is computed again from its tokens: before weights are replaced."""

from __future__ import annotations

import pytest

from tests.fixtures.memory_store import MemoryStore
from tests.unit.engine.rig import Rig
from tests.unit.engine.test_store import PROMPT, stored
from weft.schedule.snapshots import parse_snapshots


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_a_retraction_changes_no_token_and_leaves_no_lease(overlap: bool, steps: int) -> None:
    plain, rig = Rig(cache=True), Rig(cache=True, overlap=overlap)
    for one in (plain, rig):
        one.submit("one", prompt=list(range(5, 60)), max_tokens=12)
        one.submit("two", prompt=list(range(9, 30)), max_tokens=20)
    plain.run()
    for _ in range(steps):
        rig.step()
    rig.core.retract_all()
    usage = rig.core.memory.usage()
    assert usage.leases == 0
    assert rig.core.live_count == 2
    rig.core.memory.lose()
    rig.run()
    for name in ("one", "two"):
        assert rig.tokens(name) == plain.tokens(name)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_load_that_is_under_way_gives_its_memory_back(overlap: bool) -> None:
    kept, cold = stored()
    rig = Rig(cache=True, store=MemoryStore(kept), overlap=overlap)
    rig.submit("warm", PROMPT)
    while not any(plan.store.loads for plan in rig.plans):
        rig.step()
    rig.core.retract_all()
    assert rig.core.memory.usage().leases == 0
    rig.core.memory.lose()
    assert rig.core.store is not None
    rig.core.store.forget()
    kept.snapshots.clear()
    rig.run()
    assert rig.tokens("warm") == cold
    rig.core.write_all(60.0)
    assert not rig.core.store.restores.fetches
    assert rig.core.store.buffers.used_bytes == 0


def test_a_paused_engine_is_retracted_and_stays_paused() -> None:
    rig = Rig(cache=True)
    rig.submit("one", max_tokens=8)
    rig.step()
    rig.core.paused = True
    rig.core.retract_all()
    assert rig.core.paused
    assert rig.core.memory.usage().leases == 0
    rig.core.paused = False
    rig.run()
    assert len(rig.tokens("one")) == 8


@pytest.mark.parametrize(("policy", "donates"), [("preemption", True), ("auto,-preemption", False)])
def test_what_is_retracted_leaves_its_state_behind_as_a_preempted_sequence_does(policy: str, *, donates: bool) -> None:
    """A store writes it before the memory is lost."""
    rig = Rig(cache=True, snapshots=parse_snapshots(policy))
    rig.submit("one", prompt=list(range(5, 60)), max_tokens=12)
    for _ in range(3):
        rig.step()
    rig.core.retract_all()
    assert (rig.core.memory.usage().slots_cached > 0) == donates
