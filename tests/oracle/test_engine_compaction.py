"""What moves in memory changes no token: the same tokens, and logits within 1e-5 in float32.

Every step moves together whatever lies apart and is not in use by the step itself, on arenas whose frames
have many pages and several slots. Memory is full of NaN, and so is each place that something has left (see
``serving``). Negative controls: a copy is not made, a reader or a sequence is not told, and it must show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.fixtures.checkpoints import asked
from tests.oracle.serving import Answer, Serving
from tests.oracle.test_engine_prefix_cache import assert_like_cold, cold, gap, text, warm
from weft.memory.reservation import Reservation
from weft.memory.transaction import Transaction
from weft.request import SamplingParams
from weft.schedule.plan import StepPlan
from weft.schedule.plan_builder import PlanBuilder

TUNED = ("qwen3_5", "granite")
FAMILIES = asked(*TUNED)
"""A gated delta rule, and Mamba-2."""
TOLERANCE = 3e-5
"""In company sums are made in other orders; as in ``test_engine_prefix_cache``."""

TRUNKS = [text(name, 150) for name in (41, 42)]
PROMPTS = [TRUNKS[i % 2][: 64 + 40 * (i % 3)] + text(300 + i, 9 + 31 * (i % 4)) for i in range(12)]
SAMPLINGS = [SamplingParams(temperature=0.0, max_tokens=4 + 7 * (i % 4), ignore_eos=True) for i in range(12)]


@pytest.fixture(autouse=True)
def _every_step_compacts(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = Transaction.seal

    def sealing(transaction: Transaction) -> Reservation:
        transaction.compact()
        return seal(transaction)

    monkeypatch.setattr(Transaction, "seal", sealing)


def run(family: str) -> tuple[Serving, list[Answer]]:
    def forget_the_idle(serving: Serving, plan: StepPlan) -> None:
        """So that there are holes between those that run."""
        if plan.step % 3 == 0:
            serving.core.flush_cache()

    serving = warm(
        family, memory_bytes=1 << 20, step_tokens=128, max_num_seqs=12, max_model_len=320, before_step=forget_the_idle
    )
    return serving, serving.run(PROMPTS, SAMPLINGS, stagger_steps=1, boundaries=[64])


@pytest.mark.parametrize("family", FAMILIES)
def test_moving_what_is_in_use_changes_nothing(family: str) -> None:
    serving, answers = run(family)
    assert_like_cold(family, answers, PROMPTS, SAMPLINGS, company=True)
    moves = [plan.reservation.moves for plan in serving.plans]
    usage = serving.core.memory.usage()
    assert usage.moves.pages == sum(len(move.pages) for move in moves)
    assert usage.moves.slots == sum(len(move.slots) for move in moves)
    if serving.arena.pages_per_frame > 1:  # a frame of one page has no holes
        assert usage.moves.pages >= 8
        assert sum(len(move.table_patches) for move in moves) >= 4, "pages of running sequences"
    if family in TUNED:  # how many states a frame takes decides whether one has to move
        assert usage.moves.slots >= 3
        assert sum(len(move.slot_patches) for move in moves) >= 3, "states of running sequences"


def without_a_page_copy(plan: StepPlan) -> StepPlan:
    work = plan.arena_work
    return (
        replace(plan, arena_work=replace(work, page_copies=work.page_copies[:-1]))
        if plan.reservation.moves.pages
        else plan
    )


def without_a_slot_copy(plan: StepPlan) -> StepPlan:
    work = plan.arena_work
    return (
        replace(plan, arena_work=replace(work, slot_copies=work.slot_copies[:-1]))
        if plan.reservation.moves.slots
        else plan
    )


def without_a_table_patch(plan: StepPlan) -> StepPlan:
    told = plan.reservation.moves.table_patches
    return replace(plan, table_patches=plan.table_patches[:, :-1]) if told else plan


def with_the_slots_of_before(plan: StepPlan) -> StepPlan:
    moves = plan.reservation.moves
    left = {copy.dst: copy.src for copy in moves.slots}
    slots = [left.get(slot, slot) for slot in plan.slots.tolist()]
    return replace(plan, slots=np.asarray(slots, np.int32))


Forget = Callable[[StepPlan], StepPlan]


@pytest.mark.parametrize(
    "forget",
    [without_a_page_copy, without_a_slot_copy, without_a_table_patch, with_the_slots_of_before],
    ids=lambda forget: forget.__name__,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_move_that_is_made_in_part_is_noticed(family: str, forget: Forget, monkeypatch: pytest.MonkeyPatch) -> None:
    seal = PlanBuilder.seal
    monkeypatch.setattr(PlanBuilder, "seal", lambda *args: forget(seal(*args)))
    _, answers = run(family)
    gaps = [
        gap(answer, cold(family, prompt, sampling))
        for answer, prompt, sampling in zip(answers, PROMPTS, SAMPLINGS, strict=True)
    ]
    assert max(gaps) > 10 * TOLERANCE
