"""Copies and taps in the checker: a hit that is right passes, and each way to get one wrong is caught.

Sequence 0 computes 130 tokens of a prompt and keeps its state at 64 and 128. Sequence 1 then starts at 64
from copies, as the scheduler would have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.support.digests import PlanViolation, digest_of
from tests.support.scripted import ScriptedExecutor, hashed_token
from tests.support.workload import small_arena
from tests.unit.runner import plans
from weft.memory.arena_work import PageCopy
from weft.schedule.plan import StepPlan, Tap
from weft.units import PAD, PageId, SlotId

PROMPT = [(5 * at + 1) % 97 for at in range(130)]
SHARED_PAGES = [(1, index, index) for index in range(4)]
"""The table of row 1: the first four pages of row 0, which hold tokens 0 to 63."""
COLD = plans.plan(
    [(0, 0, PROMPT, 0, True)],
    admissions=[plans.admission(0, PROMPT)],
    table_writes=[(0, index, index) for index in range(9)],
    zero_frames=[0, 1, 2, 3],
    taps=[Tap(0, 64, SlotId(1)), Tap(0, 128, SlotId(2))],
)


def device(*, slots_per_frame: int = 4) -> ScriptedExecutor:
    arena = small_arena(pages_per_frame=10, slots_per_frame=slots_per_frame, frame_count=8)
    return ScriptedExecutor(arena, vocab_size=97, rows_max=4, max_model_len=400, step_tokens_bound=512)


def cold(**kinds: int) -> ScriptedExecutor:
    """After the first sequence, whose slots are in frame 0 and pages in frame 1."""
    made = device(**kinds)
    made.execute(shifted(COLD))
    return made


def shifted(plan: StepPlan, **changes: object) -> StepPlan:
    """``plan`` with its pages moved behind the frame of slots."""
    table = plan.table_writes.copy()
    table[2] += 10
    copies = tuple(PageCopy(PageId(copy.src + 10), PageId(copy.dst + 10)) for copy in plan.arena_work.page_copies)
    work = replace(plan.arena_work, page_copies=copies)
    return replace(plan, table_writes=table, arena_work=work, **changes)  # type: ignore[arg-type]


def hit(
    prompt: Sequence[int] = PROMPT,
    *,
    start: int = 64,
    slot_copies: object = ((1, 3),),
    pages: Sequence[tuple[int, int, int]] = SHARED_PAGES,
    fresh: bool = False,
    **more: object,
) -> StepPlan:
    own = [(1, index, 20 + index) for index in range(len(pages), 9)]
    return shifted(
        plans.plan(
            [(1, start, prompt[start:], 3, True)],
            fresh=[fresh],
            admissions=[plans.admission(1, prompt)],
            table_writes=[*pages, *own],
            slot_copies=slot_copies,
            **more,
        )
    )  # type: ignore[arg-type]


def test_a_right_hit_passes_and_chooses_what_a_cold_run_chooses() -> None:
    made = cold().execute(hit())
    assert made.tokens.tolist() == [hashed_token(97)(digest_of(PROMPT), 0)]


def test_a_hit_in_the_middle_of_a_page_reads_a_copy_of_the_page() -> None:
    made = cold()
    made.execute(shifted(plans.plan([(0, 130, [made.next_token(digest_of(PROMPT), 0)], 0, True)], decode_count=1)))
    # The running slot of row 0 holds the state after 131 tokens; page 8 holds tokens 128 to 130 of them.
    longer = [*PROMPT, made.next_token(digest_of(PROMPT), 0), 1, 2, 3]
    table = [(1, index, index) for index in range(8)]
    step = hit(longer, start=131, slot_copies=[(0, 3)], pages=table, page_copies=[(8, 28)])
    made.execute(step)
    other = cold()
    other.execute(shifted(plans.plan([(0, 130, [longer[130]], 0, True)], decode_count=1)))
    with pytest.raises(PlanViolation, match="does not hold position 128"):
        other.execute(replace(step, arena_work=replace(step.arena_work, page_copies=())))


@pytest.mark.parametrize("slot_copies", [[(2, 3)], [(0, 3)]])
def test_a_state_of_another_position_is_caught(slot_copies: list[tuple[int, int]]) -> None:
    with pytest.raises(PlanViolation, match="does not hold the state after 64 tokens"):
        cold().execute(hit(slot_copies=slot_copies))


def test_a_state_of_another_prefix_is_caught() -> None:
    with pytest.raises(PlanViolation, match="does not hold the state after 64 tokens"):
        cold().execute(hit([PROMPT[0] + 1, *PROMPT[1:]]))


def test_a_page_of_another_prefix_is_caught() -> None:
    # The state is right, the second page is the third.
    pages = [(1, 0, 0), (1, 1, 2), (1, 2, 2), (1, 3, 3)]
    with pytest.raises(PlanViolation, match="does not hold position 16"):
        cold().execute(hit(pages=pages))


def test_a_hit_without_its_state_is_caught() -> None:
    with pytest.raises(PlanViolation, match="does not hold the state"):
        cold().execute(hit(slot_copies=()))


def test_a_hit_that_starts_fresh_is_caught() -> None:
    with pytest.raises(PlanViolation, match="fresh"):
        cold().execute(hit(fresh=True))


def test_writing_into_a_page_that_another_reads_is_caught() -> None:
    pages = [*SHARED_PAGES, (1, 4, 4)]
    with pytest.raises(PlanViolation, match="L7"):
        cold().execute(hit(pages=pages))


@pytest.mark.parametrize(
    ("copies", "says"),
    [
        ([(5, 3)], "holds no state"),
        ([(PAD, 3)], "outside the arena"),
        ([(1, 99)], "outside the arena"),
        ([(1, 3), (2, 3)], "two copies"),
    ],
)
def test_a_wrong_copy_of_a_slot_is_caught(copies: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(PlanViolation, match=says):
        cold().execute(hit(slot_copies=copies))


@pytest.mark.parametrize(
    ("copies", "says"),
    [([(15, 28)], "holds no token"), ([(-11, 28)], "outside the arena"), ([(1, 28), (2, 28)], "two copies")],
)
def test_a_wrong_copy_of_a_page_is_caught(copies: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(PlanViolation, match=says):
        cold().execute(hit(page_copies=copies))


def test_a_copy_into_a_frame_of_the_other_kind_is_caught() -> None:
    with pytest.raises(PlanViolation, match="L6"):
        cold().execute(hit(slot_copies=[(1, 4 + 3)]))


@pytest.mark.parametrize(
    ("tap", "says"),
    [
        (Tap(0, 63, SlotId(1)), "off the grid"),
        (Tap(0, 192, SlotId(1)), "outside the run"),
        (Tap(0, 0, SlotId(1)), "outside the run"),
        (Tap(0, 64, SlotId(0)), "used twice"),
        (Tap(0, 64, SlotId(PAD)), "outside the arena"),
        (Tap(1, 64, SlotId(1)), "a run that is not there"),
        (Tap(0, 64, SlotId(4 + 1)), "L6"),
    ],
)
def test_a_wrong_tap_is_caught(tap: Tap, says: str) -> None:
    with pytest.raises(PlanViolation, match=says):
        device().execute(shifted(COLD, taps=(tap,)))


def test_two_taps_into_one_slot_are_caught() -> None:
    taps = (Tap(0, 64, SlotId(1)), Tap(0, 128, SlotId(1)))
    with pytest.raises(PlanViolation, match="used twice"):
        device().execute(shifted(COLD, taps=taps))


def test_a_tap_in_a_model_without_state_is_caught() -> None:
    made = device(slots_per_frame=0)
    step = shifted(COLD, slots=np.array([PAD], np.int32))
    with pytest.raises(PlanViolation, match="has no state"):
        made.execute(step)


def twice(prompt: Sequence[int]) -> ScriptedExecutor:
    """Two sequences that computed the same tokens into pages of their own, states at slots 0 and 3."""
    made = cold()
    own = [(1, index, 20 + index) for index in range(9)]
    made.execute(
        shifted(
            plans.plan(
                [(1, 0, prompt, 3, True)], admissions=[plans.admission(1, prompt)], table_writes=own, zero_frames=[]
            )
        )
    )
    return made


def test_a_page_may_be_replaced_by_one_with_the_same_tokens_and_no_other() -> None:
    twice(PROMPT).execute(plans.plan(table_patches=[(1, 0, 10), (1, 1, 11)]))
    with pytest.raises(PlanViolation, match="holds other tokens"):
        twice(PROMPT).execute(plans.plan(table_patches=[(1, 0, 11)]))
    with pytest.raises(PlanViolation, match="holds other tokens"):
        twice([PROMPT[0] + 1, *PROMPT[1:]]).execute(plans.plan(table_patches=[(1, 0, 10)]))
    with pytest.raises(PlanViolation, match="was not written"):
        twice(PROMPT).execute(plans.plan(table_patches=[(1, 20, 10)]))
