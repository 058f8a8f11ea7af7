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
from weft.runner.decodes import Int64s
from weft.runner.graph_shapes import GraphShape
from weft.runner.rows import rows_on
from weft.runner.sampler import Sampler
from weft.runner.staging import Staging
from weft.runner.step_graphs import StepBlock
from weft.schedule.plan import StepPlan
from weft.spec import ModelSpec, attention, short_conv
from weft.units import PAD

CPU = torch.device("cpu")
FIRST = plans.plan(
    [(3, 30, [7], 2, True), (0, 5, [8], 0, True), (4, 15, [9], 5, True)],
    decode_count=3,
    table_writes=[(3, 0, 11), (3, 1, 12), (0, 0, 13), (4, 0, 14)],
)
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
        found.append(
            replace(
                before, step=step, starts=before.starts + step, tokens=before.tokens + 3 * step, table_writes=writes
            )
        )
    return found


SAMPLER = Sampler(6, 32)


def built(batches: BatchBuilder, plan: StepPlan, arena: DeviceArena) -> StepBatch:
    batches.apply(plan, SAMPLER, arena)
    return batches.build(plan)


def told(batch: StepBatch) -> list[object]:
    inputs = batch.inputs
    runs = inputs.runs
    numbers = (
        inputs.tokens_T,
        inputs.positions_T,
        runs.starts_R,
        runs.slots_R,
        runs.context_R,
        runs.page_table_RP,
        batch.sample_runs,
        batch.sample_rows,
        batch.sample_positions,
    )
    return [
        *(number.tolist() for number in numbers),
        list(runs.offsets),
        list(runs.starts),
        list(runs.lengths),
        list(runs.slots),
        list(runs.fresh),
        runs.decode_count,
        inputs.output_rows,
    ]


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
    steps = going_on(8)  # none of them needs a page more than those before, from the third on
    for plan in steps[:3]:
        built(batches, plan, arena)
    with Counted() as counted:
        for plan in steps[3:]:
            built(batches, plan, arena)
    assert counted.ops == []
    with Counted() as counted:
        built(builder(), steps[0], arena)
    assert counted.ops, "the control: what begins is made"


# ---------------------------------------------------------------------- blocks of graphs


class Noting(Sampler):
    """Keeps the rows and positions that it draws for."""

    def __init__(self) -> None:
        super().__init__(6, 32)
        self.asked: list[list[int]] = []

    def stage(self, staging: Staging, rows: Int64s, positions: Int64s) -> None:
        self.asked.append([*rows.tolist(), *positions.tolist()])
        super().stage(staging, rows, positions)


class Graphed:
    """A builder whose steps of decodes are graphs of 4 rows. ``anew``: it makes each block anew."""

    def __init__(self, arena: DeviceArena, *, anew: bool = False, remote: bool = True) -> None:
        self.batches, self.sampler = builder(remote=remote), Noting()
        self.batches.shapes = (GraphShape.of_decodes(4),)
        self._arena, self._anew = arena, anew

    def told(self, plan: StepPlan) -> list[object]:
        """All that a step of ``plan`` has."""
        if self._anew:
            self.batches._steady_block = None
        self.batches.apply(plan, self.sampler, self._arena)
        batch = self.batches.build(plan)
        block = batch.inputs
        assert isinstance(block, StepBlock)
        hidden = torch.arange(8.0).view(4, 2)
        return [
            block.shape.decodes,
            block.adapters,
            batch.sampled_of(hidden).tolist(),
            self.sampler.asked.pop(),
            *(
                numbers.tolist()
                for numbers in (
                    block.flat,
                    batch.sample_runs,
                    batch.sample_rows,
                    batch.sample_positions,
                    batch.sample_rows_X,
                )
            ),
        ]


def unknown(plans_of_steps: list[StepPlan]) -> list[StepPlan]:
    """Every second one does not know its tokens, as with overlap."""
    return [replace(plan, tokens=np.full_like(plan.tokens, PAD)) if plan.step % 2 else plan for plan in plans_of_steps]


@pytest.mark.parametrize("remote", [True, False])
def test_a_block_that_goes_on_is_the_block_made_anew(arena, remote):
    going, anew = Graphed(arena, remote=remote), Graphed(arena, anew=True, remote=remote)
    for plan in unknown(going_on(20)):
        assert going.told(plan) == anew.told(plan)
        assert going.batches._steady_block.step == (plan.step or -1), "the first one is made"
    other = replace(plans.plan([(1, 9, [4], 1, True)], decode_count=1, table_writes=[(1, 0, 18)]), step=20)
    assert going.told(other) == anew.told(other), "and others take over"
    assert going.batches._steady_block.step == -1


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: replace(plan, rows=plan.rows[::-1].copy()),
        lambda plan: replace(plan, slots=plan.slots + 1),
        lambda plan: replace(plan, mtp_drafts=()),
        lambda plan: replace(plan, rows_cleared=(5,)),
        lambda plan: replace(plan, admissions=(plans.admission(5, [1]),)),
    ],
)
def test_a_block_does_not_go_on_where_rows_or_what_is_asked_of_them_change(arena, change):
    going, anew = Graphed(arena), Graphed(arena, anew=True)
    first, second, third = going_on(3)
    for plan in (first, second):
        assert going.told(plan) == anew.told(plan)
    changed = change(third)
    assert going.told(changed) == anew.told(changed)
    assert going.batches._steady_block is None or going.batches._steady_block.step == -1


def test_graphs_that_are_recorded_again_get_blocks_made_anew(arena):
    going, plans_of_steps = Graphed(arena), going_on(3)
    for plan in plans_of_steps[:2]:
        assert going.told(plan)[0] == 4
    going.batches.shapes = (GraphShape.of_decodes(6),)
    assert going.told(plans_of_steps[2])[0] == 6


def test_a_block_that_goes_on_asks_torch_for_less(arena):
    counts = []
    for anew in (False, True):
        graphed, steps = Graphed(arena, anew=anew), going_on(12)
        for plan in steps[:6]:
            graphed.told(plan)
        with Counted() as counted:
            for plan in steps[6:]:
                graphed.batches._steady_block = None if anew else graphed.batches._steady_block
                graphed.batches.apply(plan, graphed.sampler, arena)
                graphed.batches.build(plan)
        counts.append(len(counted.ops) / 6)
    assert counts[0] == 7, "one copy, the block's place and dtype, the rows"
    assert counts[1] > counts[0]
