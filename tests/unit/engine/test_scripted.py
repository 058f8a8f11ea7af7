"""The scripted executor is a checker, so each thing it claims to catch is done to it once."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from tests.support.digests import PlanViolation
from weft.schedule.plan import StepPlan
from weft.units import PAD, FrameId

from .rig import Rig

Tamper = Callable[[StepPlan], StepPlan]


def run_tampered(tamper: Tamper, *, when: Callable[[StepPlan], bool], rig: Rig | None = None) -> int:
    """Runs two sequences and a third after them, with plans tampered with when ``when`` says so; how many
    were. The engine's own state stays right: only the device sees the tampered plan."""
    rig = rig or Rig(rows_max=2, frame_count=8, slots_per_frame=1)
    rig.submit("a", 40, max_tokens=30)
    rig.submit("b", 50, max_tokens=8)
    rig.submit("c", 70, max_tokens=40)
    plain, tampered = rig.device.execute, []

    def execute(plan: StepPlan) -> object:
        if when(plan):
            tampered.append(plan)
            plan = tamper(plan)
        return plain(plan)

    rig.device.execute = execute  # type: ignore[method-assign,assignment]
    rig.run()
    if rig.core.failure is not None:
        raise rig.core.failure
    return len(tampered)


def edit(array: np.ndarray, at: object, value: object) -> np.ndarray:
    changed = array.copy()
    changed[at] = value  # type: ignore[index]
    return changed


def at_step(number: int) -> Callable[[StepPlan], bool]:
    return lambda plan: plan.step == number


def later_decode(plan: StepPlan) -> bool:
    return plan.step >= 5 and plan.decode_count == 2


def test_plans_that_are_left_alone_pass() -> None:
    assert run_tampered(lambda plan: plan, when=lambda plan: True) > 40


def test_a_wrong_page_in_the_page_table_is_caught() -> None:
    # The second page of "b" is written where the first of "a" is.
    with pytest.raises(PlanViolation, match="L7"):
        run_tampered(
            lambda plan: replace(plan, table_writes=edit(plan.table_writes, (2, 4), plan.table_writes[2, 0])),
            when=at_step(0),
        )


def test_a_wrong_page_that_nobody_else_has_is_caught_when_it_is_of_another_frame() -> None:
    free = 7 * 5
    with pytest.raises(PlanViolation, match="L6"):
        run_tampered(lambda plan: replace(plan, table_writes=edit(plan.table_writes, (2, 4), free)), when=at_step(0))


def test_swapped_pages_are_caught_when_the_table_changes_under_what_was_written() -> None:
    def swap(plan: StepPlan) -> StepPlan:
        # As if the row of "a" had been cleared and written again with its pages in another order.
        device = rig.device
        device._table[0, [0, 1]] = device._table[0, [1, 0]]
        return plan

    rig = Rig(rows_max=2, frame_count=8, slots_per_frame=1)
    with pytest.raises(PlanViolation, match="does not hold position 0"):
        run_tampered(swap, when=at_step(3), rig=rig)


def test_a_missing_page_table_write_is_caught() -> None:
    with pytest.raises(PlanViolation, match="page table ends before"):
        run_tampered(
            lambda plan: replace(plan, table_writes=np.empty((3, 0), dtype=np.int32)),
            when=lambda plan: plan.step > 0 and plan.table_writes.size > 0,
        )


def test_a_stale_row_is_caught() -> None:
    with pytest.raises(PlanViolation, match="was not cleared"):
        run_tampered(lambda plan: replace(plan, rows_cleared=()), when=lambda plan: bool(plan.rows_cleared))


def test_a_run_on_the_row_of_another_sequence_is_caught() -> None:
    with pytest.raises(PlanViolation, match="the row holds"):
        run_tampered(lambda plan: replace(plan, rows=edit(plan.rows, [0, 1], plan.rows[[1, 0]])), when=later_decode)


def test_a_row_that_runs_twice_is_caught() -> None:
    with pytest.raises(PlanViolation, match="two runs"):
        run_tampered(lambda plan: replace(plan, rows=edit(plan.rows, 1, plan.rows[0])), when=later_decode)


def test_a_slot_of_another_sequence_is_caught() -> None:
    with pytest.raises(PlanViolation, match="does not hold the state"):
        run_tampered(lambda plan: replace(plan, slots=edit(plan.slots, [0, 1], plan.slots[[1, 0]])), when=later_decode)


def test_a_slot_shared_by_two_runs_is_caught() -> None:
    with pytest.raises(PlanViolation, match="L1"):
        run_tampered(lambda plan: replace(plan, slots=edit(plan.slots, 1, plan.slots[0])), when=later_decode)


def test_a_slot_that_does_not_start_fresh_is_caught() -> None:
    with pytest.raises(PlanViolation, match="fresh is False"):
        run_tampered(
            lambda plan: replace(plan, fresh=edit(plan.fresh, -1, False)), when=lambda plan: bool(plan.admissions)
        )


def test_a_slot_that_starts_fresh_in_the_middle_is_caught() -> None:
    with pytest.raises(PlanViolation, match="fresh is True"):
        run_tampered(lambda plan: replace(plan, fresh=edit(plan.fresh, 0, True)), when=later_decode)


def test_an_old_state_of_the_same_sequence_is_caught() -> None:
    saved: dict[str, int] = {}

    def roll_back(plan: StepPlan) -> StepPlan:
        slot = int(plan.slots[0])
        before = int(rig.device.arena.states[slot])
        rig.device.arena.states[slot] = saved.setdefault("state", before)
        return plan

    rig = Rig(rows_max=2, frame_count=8, slots_per_frame=1)
    with pytest.raises(PlanViolation, match="does not hold the state after"):
        run_tampered(roll_back, when=later_decode, rig=rig)


def test_a_missing_slot_is_caught() -> None:
    with pytest.raises(PlanViolation, match="outside the arena"):
        run_tampered(lambda plan: replace(plan, slots=edit(plan.slots, 0, PAD)), when=later_decode)


def test_a_skipped_position_is_caught() -> None:
    with pytest.raises(PlanViolation, match="skipped or repeated"):
        run_tampered(lambda plan: replace(plan, starts=plan.starts + 1), when=later_decode)


def test_a_repeated_position_is_caught() -> None:
    with pytest.raises(PlanViolation, match="skipped or repeated"):
        run_tampered(lambda plan: replace(plan, starts=plan.starts - 1), when=later_decode)


def test_a_prefix_that_was_never_computed_is_caught() -> None:
    def pretend(plan: StepPlan) -> StepPlan:
        return replace(
            plan,
            starts=edit(plan.starts, 0, 16),
            lengths=edit(plan.lengths, 0, 24),
            tokens=plan.tokens[16:],
            fresh=edit(plan.fresh, 0, False),
        )

    with pytest.raises(PlanViolation, match="does not hold the state after 16"):
        run_tampered(pretend, when=at_step(0))
    attention_only = Rig(rows_max=2, frame_count=8, slots_per_frame=0)
    with pytest.raises(PlanViolation, match="does not hold position 0"):
        run_tampered(pretend, when=at_step(0), rig=attention_only)


def test_a_token_that_is_not_the_sequences_is_caught() -> None:
    with pytest.raises(PlanViolation, match="tokens are not"):
        run_tampered(lambda plan: replace(plan, tokens=edit(plan.tokens, 0, plan.tokens[0] ^ 1)), when=later_decode)


def zeroing(plan: StepPlan, frames: Iterable[int]) -> StepPlan:
    return replace(plan, arena_work=replace(plan.arena_work, zero_frames=tuple(map(FrameId, frames))))


def test_a_frame_that_changed_kind_and_was_not_zeroed_is_caught() -> None:
    with pytest.raises(PlanViolation, match="L6"):
        run_tampered(lambda plan: zeroing(plan, ()), when=lambda plan: bool(plan.arena_work.zero_frames))


def test_zeroing_a_frame_in_use_is_caught() -> None:
    with pytest.raises(PlanViolation, match=r"L6|does not hold"):
        run_tampered(lambda plan: zeroing(plan, range(8)), when=later_decode)


def test_a_chunk_off_the_grid_is_caught() -> None:
    with pytest.raises(PlanViolation, match="off the grid"):
        run_tampered(
            lambda plan: replace(
                plan,
                lengths=edit(plan.lengths, 0, 20),
                samples=edit(plan.samples, 0, False),
                tokens=np.delete(plan.tokens, slice(20, 40)),
            ),
            when=at_step(0),
        )


def test_a_step_over_its_bound_is_caught() -> None:
    rig = Rig(rows_max=2, frame_count=8, slots_per_frame=1, step_tokens_max=70)
    rig.device._step_tokens_bound = 60
    with pytest.raises(PlanViolation, match="at most 60"):
        run_tampered(lambda plan: plan, when=lambda plan: True, rig=rig)


def test_a_run_that_does_not_sample_when_it_must_is_caught() -> None:
    with pytest.raises(PlanViolation, match="samples is False"):
        run_tampered(lambda plan: replace(plan, samples=edit(plan.samples, 0, False)), when=later_decode)


def test_a_prefill_among_the_decodes_is_caught() -> None:
    with pytest.raises(PlanViolation, match="decode"):
        run_tampered(lambda plan: replace(plan, decode_count=plan.run_count), when=at_step(0))
