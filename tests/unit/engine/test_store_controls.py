"""Loads as a device would suffer from them: each law has a plan that breaks it, and the device says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.fixtures.memory_store import Contents, MemoryStore
from tests.unit.engine.rig import Rig
from weft.memory.arena_work import PageCopy, SlotCopy
from weft.schedule.plan import StepPlan
from weft.units import FrameId, PageId

PROMPT = [(11 * at + 5) % 97 for at in range(300)]


def stored(**rig: object) -> tuple[Contents, list[int]]:
    """What the store has of PROMPT after an engine that computed it, and the cold answer."""
    contents = Contents(Rig().core.memory.plan.page_bytes)
    first = Rig(cache=True, store=MemoryStore(contents), **rig)  # type: ignore[arg-type]
    first.submit("cold", PROMPT)
    first.run()
    first.core.close()
    return contents, first.tokens("cold")


def loaded_with(tamper: Callable[[StepPlan], StepPlan], rig: Rig | None = None) -> Rig:
    """PROMPT from the store, with each plan that loads pages changed by ``tamper``."""
    contents, _ = stored()
    again = rig or Rig(cache=True, store=MemoryStore(contents))
    again.tamper = lambda plan: tamper(plan) if plan.arena_work.page_loads else plan
    again.submit("warm", PROMPT)
    for _ in range(60):
        if again.core.failure is None and again.core.has_work:
            again.core.step()
    return again


def with_work(plan: StepPlan, **work: object) -> StepPlan:
    return replace(plan, arena_work=replace(plan.arena_work, **work))  # type: ignore[arg-type]


def to_another_page(plan: StepPlan) -> StepPlan:
    [load] = plan.arena_work.page_loads
    free = next(page for page in range(200) if page not in plan.reservation.pages)
    return with_work(plan, page_loads=(replace(load, pages=(PageId(free), *load.pages[1:])),))


def to_another_slot(plan: StepPlan) -> StepPlan:
    [load] = plan.arena_work.state_loads
    return with_work(plan, state_loads=(replace(load, slot=load.slot + 1),))


def copied_before_it_landed(plan: StepPlan) -> StepPlan:
    """A copy of a page that this step loads: on a device without an order, of what lay there before."""
    [load] = plan.arena_work.page_loads
    return with_work(plan, page_copies=(PageCopy(load.pages[0], load.pages[1]),))


def copied_state(plan: StepPlan) -> StepPlan:
    [load] = plan.arena_work.state_loads
    return with_work(plan, slot_copies=(SlotCopy(load.slot, load.slot + 1),))


def from_a_buffer_that_is_freed(plan: StepPlan) -> StepPlan:
    [load] = plan.arena_work.page_loads
    return with_work(plan, page_loads=(replace(load, buffer=load.buffer + 7),))


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (to_another_page, "no lease of this plan loads it"),
        (to_another_slot, "no lease of this plan loads it"),
        (copied_before_it_landed, "loaded and copied in one step"),
        (copied_state, "loaded and copied in one step"),
        (from_a_buffer_that_is_freed, "was not added, or is freed"),
    ],
)
def test_a_load_that_breaks_a_law_is_noticed(tamper: Callable[[StepPlan], StepPlan], says: str) -> None:
    assert says in str(loaded_with(tamper).core.failure)


def test_the_same_loads_untouched_break_none() -> None:
    """The control of the controls."""
    again = loaded_with(lambda plan: plan)
    assert again.core.failure is None
    assert again.core.stats().cached_tokens == 256


def test_a_load_into_a_frame_that_is_not_zeroed_is_noticed() -> None:
    """Frames held states, and a load makes them frames of pages (law L6). Without the zeros, it is seen."""

    def run(tamper: Callable[[StepPlan], StepPlan]) -> tuple[Rig, list[tuple[FrameId, ...]]]:
        contents, _ = stored()
        rig = Rig(cache=True, store=MemoryStore(contents), frame_count=10, max_model_len=320)
        for number in range(4):
            rig.submit(f"short{number}", [number + 1] * 17)
        rig.run()
        rig.core.flush_cache()
        zeroed: list[tuple[FrameId, ...]] = []

        def noting(plan: StepPlan) -> StepPlan:
            zeroed.append(plan.arena_work.zero_frames)
            return tamper(plan)

        return loaded_with(noting, rig), zeroed

    right, zeroed = run(lambda plan: plan)
    assert right.core.failure is None
    assert any(zeroed), "no load claimed a frame of another kind"
    wrong, _ = run(lambda plan: with_work(plan, zero_frames=()))
    assert "L6" in str(wrong.core.failure)


def test_an_exact_engine_never_loads_rounded_bytes() -> None:
    """The store itself would hand them out here; an engine that is not exact takes them."""
    cached = []
    for exact in (True, False):
        contents, cold = stored()
        for snapshot in contents.snapshots.values():
            snapshot.exact = False
        store = MemoryStore(contents)
        rig = Rig(cache=True, store=store, exact=exact)
        rig.submit("warm", PROMPT)
        rig.run()
        assert rig.tokens("warm") == cold
        assert store.fetch_count == (0 if exact else 1)
        cached.append(rig.core.stats().cached_tokens)
    assert cached == [0, 256]
