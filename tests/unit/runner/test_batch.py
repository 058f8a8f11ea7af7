"""What a step plan becomes on the torch side, and what stays in a row and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.fixtures.far_memory import far_memory
from tests.support.arena_fills import fill_frames, fill_pages, fill_slots
from tests.unit.runner import plans
from weft.memory.arena_work import CompressState, RestoreState
from weft.memory.frames.plan import plan_arena
from weft.memory.values import NO_NODE
from weft.runner.arena import NAN_BYTE, DeviceArena
from weft.runner.batch import BatchBuilder
from weft.runner.rows import rows_on
from weft.runner.sampler import Sampler
from weft.runner.staging import Staging
from weft.schedule.plan import Tap
from weft.spec import ModelSpec, attention, short_conv
from weft.units import PAD, PageId, SlotId

CPU = torch.device("cpu")


@pytest.fixture
def arena() -> DeviceArena:
    spec = ModelSpec("tiny", 32, 16, 512, "float32", (attention(2, 16), short_conv(32, 3)))
    return DeviceArena(plan_arena(spec, 200_000), CPU)


@pytest.fixture(autouse=True, params=["on the host", "by copies"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every promise holds for both kinds of rows: as on a CPU, and as on a GPU, with one copy a step."""
    with far_memory(request.param == "by copies"):
        yield


def builder(pad_decode_to: int = 0) -> BatchBuilder:
    rows = rows_on(CPU, rows_max=6, pages_max=8, step_tokens_max=64)
    return BatchBuilder(rows, step_tokens_max=64, pad_decode_to=pad_decode_to)


@pytest.mark.parametrize("tokens", [8192, 512])
def test_the_first_long_prompts_fit_into_the_staging_buffer(
    arena: DeviceArena, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """What does not fit goes by a copy of pageable memory, and the host waits for each. One row has a hit of
    the longest context; all rows draw, and ask for logprobs."""
    rows = rows_on(CPU, rows_max=64, pages_max=4096, step_tokens_max=tokens)
    batches = BatchBuilder(rows, step_tokens_max=tokens)
    capacity = rows.staging.capacity_bytes
    with far_memory():
        chosen = Sampler(64, 32)
    long = tokens - 63
    runs = [(row, 70, [row], row % 3, True) for row in range(63)] + [(63, 64, list(range(long)), 5, True)]
    admissions = [plans.admission(row, list(range(65)), logprobs=3) for row in range(63)]
    admissions.append(plans.admission(63, list(range(long + 64)), prompt_logprobs=2))
    admissions = [replace(one, sampling=structs.replace(one.sampling, temperature=0.8)) for one in admissions]
    step = plans.plan(
        runs,
        decode_count=63,
        admissions=admissions,
        prompt_logprob_runs=[63],
        zero_frames=[0],
        table_writes=[(63, column, 1) for column in range(4096)] + [(row, 4, 2) for row in range(63)],
    )
    elsewhere: list[int] = []
    send = Staging.send
    monkeypatch.setattr(Staging, "send", lambda self: (elsewhere.append(self._asked), send(self))[1])
    monkeypatch.setattr(arena, "zero_frames", lambda frames: None)
    batches.apply(step, chosen, arena)
    assert max(elsewhere) <= capacity
    assert capacity < 1 << 20


def sampler() -> Sampler:
    return Sampler(6, 32)


MIXED = plans.plan(
    [(3, 20, [7], 2, True), (0, 5, [8], 0, True), (4, 0, [1, 2, 3], 5, False), (1, 64, [9, 10], 1, True)],
    decode_count=2,
    admissions=[plans.admission(4, [1, 2, 3, 4])],
    table_writes=[(3, 0, 11), (3, 1, 12), (0, 0, 13), (4, 0, 14), (1, 0, 20), (1, 4, 21)],
)


def test_a_mixed_step_becomes_flat_tokens_positions_and_runs(arena):
    batches = builder()
    batches.apply(MIXED, sampler(), arena)
    batch = batches.build(MIXED)
    runs = batch.inputs.runs
    assert batch.inputs.tokens_T.tolist() == [7, 8, 1, 2, 3, 9, 10]
    assert batch.inputs.positions_T.tolist() == [20, 5, 0, 1, 2, 64, 65]
    assert (runs.offsets, runs.starts, runs.lengths) == ([0, 1, 2, 5], [20, 5, 0, 64], [1, 1, 3, 2])
    assert (runs.slots, runs.fresh, runs.decode_count) == ([2, 0, 5, 1], [False, False, True, False], 2)
    assert runs.context_R.tolist() == [21, 6, 3, 66]
    assert runs.starts_R.tolist() == runs.starts
    assert runs.slots_R.tolist() == runs.slots
    assert runs.page_table_RP.dtype == torch.int32
    assert runs.page_table_RP.tolist() == [
        [11, 12, PAD, PAD, PAD],
        [13, PAD, PAD, PAD, PAD],
        [14, PAD, PAD, PAD, PAD],
        [20, PAD, PAD, PAD, 21],
    ]
    assert batch.sample_runs.tolist() == [0, 1, 3]
    assert batch.sample_rows.tolist() == [3, 0, 1]
    assert batch.sample_positions.tolist() == [21, 6, 66]
    assert batch.sample_index_X.tolist() == [0, 1, 6]


def test_pad_rows_sit_behind_the_decodes_and_point_nowhere(arena):
    batches = builder(pad_decode_to=4)
    batches.apply(MIXED, sampler(), arena)
    batch = batches.build(MIXED)
    runs = batch.inputs.runs
    assert batch.inputs.tokens_T.tolist() == [7, 8, 0, 0, 1, 2, 3, 9, 10]
    assert batch.inputs.positions_T.tolist() == [20, 5, PAD, PAD, 0, 1, 2, 64, 65]
    assert runs.decode_count == 4
    assert runs.starts == [20, 5, PAD, PAD, 0, 64]
    assert runs.slots == [2, 0, PAD, PAD, 5, 1]
    assert runs.lengths == [1, 1, 1, 1, 3, 2]
    assert runs.context_R.tolist() == [21, 6, 0, 0, 3, 66]
    assert (runs.page_table_RP[2:4] == PAD).all()
    assert batch.sample_runs.tolist() == [0, 1, 3]
    assert batch.sample_index_X.tolist() == [0, 1, 8]
    assert batch.sample_positions.tolist() == [21, 6, 66]


def test_a_step_without_decodes_can_be_padded_too(arena):
    batches = builder(pad_decode_to=2)
    prefill = plans.plan([(0, 0, [4, 5], 1, True)])
    batches.apply(prefill, sampler(), arena)
    batch = batches.build(prefill)
    assert batch.inputs.positions_T.tolist() == [PAD, PAD, 0, 1]
    assert batch.sample_index_X.tolist() == [3]


def test_a_cleared_row_has_no_page_left_before_the_next_owner_writes(arena):
    batches = builder()
    batches.apply(MIXED, sampler(), arena)
    assert batches.pages_of(3) == [11, 12]
    following = plans.plan(
        [(3, 0, [1], 2, True)], rows_cleared=[3], admissions=[plans.admission(3, [1])], table_writes=[(3, 0, 5)]
    )
    batches.apply(following, sampler(), arena)
    assert batches.pages_of(3) == [5]
    assert batches.build(following).inputs.runs.page_table_RP.tolist() == [[5]]
    kept = plans.plan([(3, 0, [1], 2, True)], table_writes=[(3, 0, 5)])
    other = builder()
    other.apply(MIXED, sampler(), arena)
    other.apply(kept, sampler(), arena)
    assert other.pages_of(3) == [5, 12], "the control: without rows_cleared the old page stays"


def test_taps_and_prompt_logprobs_follow_their_run_past_the_pads(arena):
    step = plans.plan(
        [(0, 9, [1], 0, True), (1, 64, [20, 21, 22], 1, False)],
        decode_count=1,
        admissions=[plans.admission(1, list(range(100)), prompt_logprobs=2)],
        taps=[Tap(run=1, position=66, slot=SlotId(3))],
        prompt_logprob_runs=[1],
    )
    for pads in (0, 3):
        batches = builder(pad_decode_to=pads)
        batches.apply(step, sampler(), arena)
        batch = batches.build(step)
        extra = max(0, pads - 1)
        [tap] = batch.inputs.runs.taps
        assert (tap.run, tap.offset, tap.slot) == (1 + extra, 2, 3)
        [span] = batch.prompt_spans
        assert (span.run, span.first, span.top_count) == (1, 1 + extra, 2)
        assert span.next_tokens_N.tolist() == [65, 66, 67]


def test_prompt_logprobs_end_before_the_first_generated_token(arena):
    """Also where a preempted sequence computes its prompt and its answer again."""
    step = plans.plan(
        [(0, 0, [1, 2, 3, 4, 5], 0, True)],
        prompt_logprob_runs=[0],
        admissions=[plans.admission(0, [1, 2, 3, 4, 5], prompt_tokens=3, prompt_logprobs=0)],
    )
    batches = builder()
    batches.apply(step, sampler(), arena)
    assert batches.build(step).prompt_spans[0].next_tokens_N.tolist() == [2, 3]


def test_frames_that_changed_kind_are_zeroed_and_no_other(arena):
    fill_frames(arena, range(arena.plan.frame_count), NAN_BYTE)
    builder().apply(plans.plan(zero_frames=[1, 3]), sampler(), arena)
    frames = arena.buffer.view(arena.plan.frame_count, arena.plan.frame_bytes)
    zero = [frame for frame in range(arena.plan.frame_count) if not frames[frame].any()]
    assert zero == [1, 3]


def test_poisoned_pages_and_slots_are_nan_in_every_view_and_nowhere_else(arena):
    fill_frames(arena, range(arena.plan.frame_count), 0)
    fill_pages(arena, [2], NAN_BYTE)
    caches = arena.layer_caches(2)
    k = caches[0].k
    assert k is not None
    assert k[2].isnan().all()
    assert not k[[1, 3]].isnan().any()
    fill_frames(arena, range(arena.plan.frame_count), 0)
    fill_slots(arena, [4], NAN_BYTE)
    conv = caches[1].state["conv"]
    assert conv[4].isnan().all()
    assert not conv[[3, 5]].isnan().any()


def test_a_plan_with_more_tokens_than_a_step_may_have_is_a_bug(arena):
    batches = builder()
    long = plans.plan([(0, 0, list(range(65)), 0, True)])
    with pytest.raises(AssertionError, match="65 tokens"):
        batches.apply(long, sampler(), arena)
    fits = plans.plan([(0, 0, list(range(64)), 0, True)])
    batches.apply(fits, sampler(), arena)
    assert batches.build(fits).inputs.tokens_T.tolist() == np.arange(64).tolist()


def marked(arena: DeviceArena, stride_bytes: int) -> torch.Tensor:
    """The arena as items of ``stride_bytes``, each full of its own index."""
    fill_frames(arena, range(arena.plan.frame_count), 0)
    items = arena.buffer.view(-1, stride_bytes)
    items.copy_((torch.arange(items.shape[0]) % 251).to(torch.uint8)[:, None].expand_as(items))
    return items


@pytest.mark.parametrize("kind", ["slot", "page"])
@pytest.mark.parametrize("copies", [[(1, 4)], [(1, 4), (1, 5), (2, 6)], [(3, 4), (4, 5), (5, 3)]])
def test_copies_read_every_source_before_they_write_and_touch_nothing_else(arena, kind, copies):
    stride = arena.plan.slot_stride_bytes if kind == "slot" else arena.plan.page_bytes
    items = marked(arena, stride)
    before = items.clone()
    step = plans.plan(**{f"{kind}_copies": copies})
    builder().apply(step, sampler(), arena)
    for source, destination in copies:
        assert torch.equal(items[destination], before[source])
    changed = [i for i in range(len(items)) if not torch.equal(items[i], before[i])]
    assert changed == sorted(destination for _, destination in copies)


def test_a_page_is_copied_into_a_frame_after_the_frame_was_zeroed(arena):
    items = marked(arena, arena.plan.page_bytes)
    per_frame = arena.plan.pages_per_frame
    builder().apply(plans.plan(zero_frames=[1], page_copies=[(2, per_frame)]), sampler(), arena)
    assert (items[per_frame] == 2).all()
    assert not items[per_frame + 1 : 2 * per_frame].any()


def test_arena_work_is_performed_in_its_one_order(arena, monkeypatch):
    performed = []
    monkeypatch.setattr(DeviceArena, "perform", lambda _, kind, ids: performed.append(kind))
    step = plans.plan(zero_frames=[1], slot_copies=[(0, 1)], page_copies=[(0, 1)])
    step = replace(
        step,
        arena_work=replace(
            step.arena_work,
            state_restores=(RestoreState((PageId(2),), SlotId(2)),),
            state_compressions=(CompressState(NO_NODE, SlotId(3), (PageId(3),)),),
        ),
    )
    builder().apply(step, sampler(), arena)
    assert performed == [kind for kind, _ in step.arena_work.ordered()]
    assert len(performed) == 5


def test_a_copy_that_names_nothing_is_refused(arena):
    for copies in ([(PAD, 1)], [(1, PAD)], [(0, arena.plan.slot_count)]):
        with pytest.raises(AssertionError):
            builder().apply(plans.plan(slot_copies=copies), sampler(), arena)


def test_a_patch_replaces_an_entry_of_a_row(arena):
    batches = builder()
    batches.apply(MIXED, sampler(), arena)
    batches.apply(plans.plan(table_patches=[(3, 1, 9)]), sampler(), arena)
    assert batches.pages_of(3) == [11, 9]
