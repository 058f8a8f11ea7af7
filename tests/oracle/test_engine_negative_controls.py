"""Each thing that must change nothing, broken on purpose: the comparison with transformers has to notice.

And it has to notice in the right place: what is broken for one sequence must leave its neighbours alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.oracle.serving import (
    FAMILIES,
    PROMPT_LENGTHS,
    RECURRENT_FAMILIES,
    TOLERANCE,
    Serving,
    Truth,
    distance,
    tight_memory,
    truth,
)
from tests.support.arena_fills import fill_pages, fill_slots
from weft.runner.batch import BatchBuilder, StepBatch
from weft.schedule.plan import StepPlan
from weft.units import PAD

VICTIM = 3
"""Which of the prompts (300 tokens) is broken; the others are watched for damage."""
BROKEN_AT_STEP = 40


def gaps(serving: Serving, truths: tuple[Truth, ...]) -> list[float]:
    answers = serving.run([one.prompt for one in truths])
    return [distance(answer, one) for answer, one in zip(answers, truths, strict=True)]


def assert_only_the_victim_differs(serving: Serving, family: str) -> None:
    found = gaps(serving, truth(family))
    assert found[VICTIM] > 10 * TOLERANCE, "the damage was not noticed"
    assert max(gap for i, gap in enumerate(found) if i != VICTIM) < TOLERANCE, "it spread"


def at_one_step(damage: Callable[[Serving, int, int], None]) -> Callable[[Serving, StepPlan], None]:
    """``damage(serving, row, slot)`` of the victim, once, between two of its decodes."""
    prompt_tokens = PROMPT_LENGTHS[VICTIM]

    def before_step(serving: Serving, plan: StepPlan) -> None:
        if plan.step != BROKEN_AT_STEP:
            return
        run = plan.seqs.index(VICTIM)
        assert plan.starts[run] >= prompt_tokens, "the victim is not decoding yet"
        damage(serving, int(plan.rows[run]), int(plan.slots[run]))

    return before_step


def zero_slot(serving: Serving, row: int, slot: int) -> None:
    fill_slots(serving.executor.arena, [slot], 0)


def swap_slot(serving: Serving, row: int, slot: int) -> None:
    """The victim's state becomes a copy of another running sequence's."""
    arena, stride = serving.executor.arena.buffer, serving.arena.slot_stride_bytes
    other = next(held for held in serving.slot_of_row.values() if held not in (slot, PAD))
    arena[slot * stride : (slot + 1) * stride] = arena[other * stride : (other + 1) * stride].clone()


def zero_a_page(serving: Serving, row: int, slot: int) -> None:
    fill_pages(serving.executor.arena, serving.pages_of_row[row][4:5], 0)


def lose_a_table_entry(serving: Serving, row: int, slot: int) -> None:
    serving.executor.batches.rows.table_row(row)[4] = PAD


def point_at_a_neighbour(serving: Serving, row: int, slot: int) -> None:
    """The victim reads a page of the longest prompt: nothing is NaN, everything looks healthy."""
    other = next(pages for owner, pages in serving.pages_of_row.items() if owner != row and len(pages) > 20)
    serving.executor.batches.rows.table_row(row)[4] = other[4]


@pytest.mark.parametrize("damage", [zero_slot, swap_slot], ids=lambda f: f.__name__)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_damaged_state_is_noticed_and_stays_where_it_is(family, damage):
    assert_only_the_victim_differs(Serving(family, before_step=at_one_step(damage)), family)


@pytest.mark.parametrize("damage", [zero_a_page, lose_a_table_entry, point_at_a_neighbour], ids=lambda f: f.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_damaged_page_is_noticed_and_stays_where_it_is(family, damage):
    assert_only_the_victim_differs(Serving(family, before_step=at_one_step(damage)), family)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_state_lost_between_two_chunks_is_noticed(family):
    """The control of the chunk sizes: the hand-over carries what it must."""

    def lose_first_chunk(serving: Serving, plan: StepPlan) -> None:
        if VICTIM in plan.seqs and plan.starts[plan.seqs.index(VICTIM)] == 192:
            fill_slots(serving.executor.arena, [int(plan.slots[plan.seqs.index(VICTIM)])], 0)

    serving = Serving(family, step_tokens=64 + 5, before_step=lose_first_chunk)
    assert_only_the_victim_differs(serving, family)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_state_that_does_not_start_fresh_is_noticed(family, monkeypatch):
    """The control of recycled memory and of preemption: what is in a slot before its sequence starts is NaN,
    and reading it shows."""
    apply = BatchBuilder.apply

    def never_fresh(self: BatchBuilder, plan: StepPlan, *others: object) -> None:
        apply(self, replace(plan, fresh=plan.fresh & False), *others)

    monkeypatch.setattr(BatchBuilder, "apply", never_fresh)
    assert min(gaps(Serving(family), truth(family))) == float("inf")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pad_row_that_points_somewhere_is_noticed(family, monkeypatch):
    """The control of L4: padding that borrows a real row and slot damages its owner."""
    build = BatchBuilder.build

    def borrow(self: BatchBuilder, plan: StepPlan) -> StepBatch:
        batch = build(self, plan)
        runs, inputs = batch.inputs.runs, batch.inputs
        decodes = plan.decode_count
        pads = range(decodes, runs.decode_count)
        if not decodes or VICTIM not in plan.seqs[:decodes]:
            return batch
        owner = plan.seqs.index(VICTIM)
        for pad in pads:
            runs.slots[pad], runs.starts[pad] = runs.slots[owner], 0
            runs.slots_R[pad], runs.starts_R[pad], runs.context_R[pad] = runs.slots_R[owner], 0, 1
            runs.page_table_RP[pad] = runs.page_table_RP[owner]
            inputs.positions_T[runs.offsets[pad]] = 0
        return batch

    healthy = gaps(Serving(family, pad_decode_to=8), truth(family))
    assert max(healthy) < TOLERANCE
    monkeypatch.setattr(BatchBuilder, "build", borrow)
    assert gaps(Serving(family, pad_decode_to=8), truth(family))[VICTIM] > TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_a_preempted_sequence_forgets_are_noticed(family):
    """The control of preemption: a resumed sequence that computes one wrong token of its own answer again."""

    def forget(serving: Serving, plan: StepPlan) -> None:
        for admission in plan.admissions:
            if admission.tokens.size > admission.prompt_tokens:
                for run, seq in enumerate(plan.seqs):
                    if seq == admission.seq:
                        first = int(plan.lengths[:run].sum())
                        plan.tokens[first : first + int(plan.lengths[run])] = 7
                        damaged.add(int(seq))

    damaged: set[int] = set()
    serving = Serving(family, memory_bytes=tight_memory(family, spare_pages=20), step_tokens=400, before_step=forget)
    found = gaps(serving, truth(family)[::-1])
    assert damaged
    for seq, gap in enumerate(found):
        assert (gap > TOLERANCE) == (seq in damaged)
