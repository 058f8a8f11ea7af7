"""The table of runs that kernels work by comes to the device with the step's other inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.fixtures.far_memory import far_memory
from tests.unit.runner import plans
from weft.memory.frames.plan import plan_arena
from weft.runner.arena import DeviceArena
from weft.runner.batch import BatchBuilder
from weft.runner.rows import rows_on
from weft.runner.sampler import Sampler
from weft.schedule.plan import Tap
from weft.spec import ModelSpec, attention, short_conv
from weft.tensor.gpu.runs import GRID_YZ_MAX, DeviceRuns, device_runs, unpack
from weft.units import SlotId

MIXED = plans.plan(
    [(3, 20, [7], 2, True), (0, 5, [8], 0, True), (4, 40, list(range(171)), 5, False), (1, 0, [9, 10], 1, True)],
    decode_count=2,
    admissions=[plans.admission(4, [1, 2, 3, 4])],
    taps=[Tap(run=2, position=128, slot=SlotId(3))],
    table_writes=[(3, 0, 11)],
)


def test_the_runs_of_a_step_are_staged_with_it_and_are_those_that_would_be_made_later(device: torch.device) -> None:
    spec = ModelSpec("tiny", 32, 16, 512, "float32", (attention(2, 16), short_conv(32, 3)))
    arena = DeviceArena(plan_arena(spec, 200_000), device)
    for pads in (0, 5):
        with far_memory():
            rows = rows_on(device, rows_max=6, pages_max=16, step_tokens_max=300)
        batches = BatchBuilder(rows, step_tokens_max=300, pad_decode_to=pads)
        batches.apply(MIXED, Sampler(6, 32), arena)
        runs = batches.build(MIXED).inputs.runs
        staged = runs.memo["device_runs"]
        made = device_runs(dataclasses.replace(runs, memo={}))
        assert staged is not made
        for one in dataclasses.fields(DeviceRuns):
            ours, theirs = getattr(staged, one.name), getattr(made, one.name)
            assert ours == theirs if isinstance(ours, int) else torch.equal(ours, theirs), one.name
        assert [tap.offset for tap in runs.taps] == [88]
        assert made.chunk_tokens_C.tolist() == [24, 64, 64, 19, 2]
        assert made.chunk_tap_C.tolist() == [-1, 3, -1, -1, -1]
        first = staged.offsets_R.data_ptr()
        fields = [getattr(staged, one.name) for one in dataclasses.fields(DeviceRuns)]
        places = [field.data_ptr() - first for field in fields if isinstance(field, torch.Tensor)]
        assert all(place % 16 == 0 for place in places)


@pytest.mark.parametrize(("runs", "chunks"), [(1, GRID_YZ_MAX + 1), (GRID_YZ_MAX + 1, 0)])
def test_a_step_beyond_the_axis_of_a_grid_is_caught(runs: int, chunks: int) -> None:
    with pytest.raises(AssertionError, match="65535"):
        unpack(torch.zeros(0, dtype=torch.int32), runs, 0, chunks)
