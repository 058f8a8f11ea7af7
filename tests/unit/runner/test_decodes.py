"""Decodes that go on: the same inputs as made anew, and nothing made that stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fixtures.far_memory import far_memory
from tests.unit.runner import plans
from weft.memory.frames.plan import plan_arena
from weft.runner.arena import DeviceArena
from weft.runner.batch import BatchBuilder, StepBatch
from weft.runner.rows import rows_on
from weft.runner.sampler import Sampler
from weft.schedule.plan import StepPlan
from weft.spec import ModelSpec, attention, short_conv
from weft.units import PAD

CPU = torch.device("cpu")
FIRST = plans.plan(
    [(3, 30, [7], 2, True), (0, 5, [8], 0, True), (4, 15, [9], 5, True)], decode_count=3,
    table_writes=[(3, 0, 11), (3, 1, 12), (0, 0, 13), (4, 0, 14)])
WRITES = {2: [(3, 2, 15), (4, 1, 16)], 5: [(1, 0, 17)]}
"""By step; the last one is of a row that does not decode."""


@pytest.fixture
def arena() -> DeviceArena:
    spec = ModelSpec("tiny", 32, 16, 512, "float32", (attention(2, 16), short_conv(32, 3)))
    return DeviceArena(plan_arena(spec, 200_000), CPU)


def builder(*, remote: bool = False) -> BatchBuilder:
    with far_memory(remote):
        rows = rows_on(CPU, rows_max=6, pages_max=8, step_tokens_max=64)
    return BatchBuilder(rows, step_tokens_max=64)


def going_on(steps: int, before: StepPlan = FIRST) -> list[StepPlan]:
    """``before``, and the steps that follow it as the planner hands them out: with its arrays."""
    found = [before]
    for step in range(1, steps):
        writes = np.array(WRITES.get(step, []), np.int32).reshape(-1, 3).T
        found.append(replace(before, step=step, starts=before.starts + step, tokens=before.tokens + 3 * step,
                             table_writes=writes))
    return found


SAMPLER = Sampler(6, 32)


def built(batches: BatchBuilder, plan: StepPlan, arena: DeviceArena) -> StepBatch:
    batches.apply(plan, SAMPLER, arena)
    return batches.build(plan)


def told(batch: StepBatch) -> list[object]:
    inputs = batch.inputs
    runs = inputs.runs
    numbers = (inputs.tokens_T, inputs.positions_T, runs.starts_R, runs.slots_R, runs.context_R,
               runs.page_table_RP, batch.sample_runs, batch.sample_rows, batch.sample_positions)
    return [*(number.tolist() for number in numbers), list(runs.offsets), list(runs.starts),
            list(runs.lengths), list(runs.slots), list(runs.fresh), runs.decode_count, inputs.asked]


def test_steps_that_go_on_see_what_steps_made_anew_see(arena):
    batches, anew = builder(), builder(remote=True)
    for plan in going_on(20):
        assert told(built(batches, plan, arena)) == told(built(anew, plan, arena))
    other = plans.plan([(1, 9, [4], 1, True)], decode_count=1, table_writes=[(1, 0, 18)])
    assert told(built(batches, other, arena)) == told(built(anew, other, arena)), "and others take over"


def test_a_plan_with_other_arrays_is_never_taken_for_one_that_goes_on(arena):
    batches = builder()
    first, second = going_on(2)
    built(batches, first, arena)
    swapped = replace(second, slots=second.slots[::-1].copy())
    assert built(batches, swapped, arena).inputs.runs.slots == [5, 0, 2]
    swapped = replace(second, rows=second.rows[::-1].copy())
    assert built(batches, swapped, arena).sample_rows.tolist() == [4, 0, 3]


def test_a_token_that_the_plan_does_not_know_is_what_its_row_chose_last(arena):
    batches = builder()
    first, second = going_on(2)
    built(batches, first, arena)
    batches.rows.chosen[:] = torch.arange(100, 107)
    unknown = replace(second, tokens=np.array([PAD, 11, PAD], np.int32))
    assert built(batches, unknown, arena).inputs.tokens_T.tolist() == [103, 11, 104]


def test_who_asks_for_a_row_of_the_table_may_write_it(arena):
    batches = builder()
    first, second, third = going_on(3)
    built(batches, first, arena)
    batches.rows.table_row(3)[1] = 19
    assert built(batches, second, arena).inputs.runs.page_table_RP[0].tolist()[:2] == [11, 19]
    batches.rows.table[3, 1] = 12
    seen = built(batches, third, arena).inputs.runs.page_table_RP[0].tolist()
    assert seen[:2] == [11, 19], "the control: the table by run is a copy, and this write told nobody"


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_that_goes_on_asks_torch_for_nothing(arena):
    batches = builder()
    steps = going_on(8)   # none of them needs a page more than those before, from the third on
    for plan in steps[:3]:
        built(batches, plan, arena)
    with Counted() as counted:
        for plan in steps[3:]:
            built(batches, plan, arena)
    assert counted.ops == []
    with Counted() as counted:
        built(builder(), steps[0], arena)
    assert counted.ops, "the control: what begins is made"
