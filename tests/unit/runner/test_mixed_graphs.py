"""Which steps with prompts go to a graph, how they are padded, and what such a graph may read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.support.graph_steps import EagerCapture
from tests.unit.runner import plans
from tests.unit.runner.test_graphs import SIZES, Recording, RunsOnce, Successor
from weft.memory.frames.plan import plan_arena
from weft.runner.graph_shapes import OUTSIDE, TOKENS, GraphShape, mixed_shapes, outside, recorded_shapes
from weft.runner.graphs import Replay
from weft.runner.torch_executor import GRAPH, TorchExecutor
from weft.schedule.plan import StepPlan, Tap
from weft.units import PAD, SlotId

SMALL, LARGE = GraphShape(64, 8, 12, 38), GraphShape(112, 8, 12, 39)
SHAPES = (SMALL, GraphShape(64, 12, 12, 38), LARGE, GraphShape(112, 12, 12, 39))


class Replayed(Recording):
    """``sizes``: rows of the hidden state of each replay."""

    @property
    def mixed(self) -> list[int]:
        return [size for size in self.replays if size > SIZES.rows_max]


def executor(model: Successor, capture: Recording | EagerCapture | None) -> TorchExecutor:
    made = TorchExecutor(model, plan_arena(model.spec, 200_000), SIZES, capture=capture)
    made.record_graphs()
    return made


def recorded(made: TorchExecutor) -> tuple[GraphShape, ...]:
    """The shapes of steps with prompts to which steps are padded."""
    return tuple(shape for shape in made.batches.shapes if not shape.decodes_alone)


def mixed(
    decodes: int = 2, prompts: tuple[int, ...] = (3, 5), taps: int = 0, first: int = 5, unknown: bool = False
) -> StepPlan:
    """Decodes behind 20 tokens, and new prompts that count upwards."""
    runs = [(row, 20 + row, [PAD if unknown else first + row], row, True) for row in range(decodes)]
    runs += [
        (decodes + i, 0, [(10 * i + token) % 50 for token in range(length)], decodes + i, True)
        for i, length in enumerate(prompts)
    ]
    return plans.plan(
        runs,
        decode_count=decodes,
        admissions=[plans.admission(row, [1]) for row, *_ in runs],
        table_writes=[(row, 0, 30 + row) for row, *_ in runs],
        taps=[Tap(decodes, 1 + at, SlotId(20 + at)) for at in range(taps)],
    )


def test_shapes_waste_little_and_reach_every_row() -> None:
    shapes = mixed_shapes(256, 8192)
    assert list(shapes) == sorted(set(shapes))
    assert {shape.decodes for shape in shapes} == {8, 64, 256}
    assert shapes[-1].tokens == TOKENS[-1]
    assert len(shapes) <= 33, "each of them takes three steps at start"
    assert {shape.prompts for shape in shapes} == {16}
    assert all(later <= earlier * 4 / 3 for earlier, later in pairwise(TOKENS[3:]))
    assert mixed_shapes(12, 100) == SHAPES
    assert mixed_shapes(1, 64) == (GraphShape(80, 1, 1, 6),), "64 tokens next to a PAD row"
    assert mixed_shapes(256, 0) == ()


@pytest.mark.parametrize("shape", mixed_shapes(256, 8192))
def test_a_shape_has_room_for_the_chunks_of_any_prompts_on_the_grid(shape: GraphShape) -> None:
    """Each prompt has a piece of a chunk at both ends and a tap off the grid."""
    for count in range(1, shape.prompts + 1):
        lengths = [1 + i for i in range(count - 1)]
        lengths.append(shape.tokens - shape.decodes - sum(lengths))
        assert shape.holds(shape.decodes, lengths, count)
        assert not shape.holds(shape.decodes, [*lengths[:-1], lengths[-1] + 1], count), "a token too many"
    assert not shape.holds(shape.decodes + 1, [1], 0)
    assert not shape.holds(0, [1] * (shape.prompts + 1), 0)
    assert not shape.holds(0, [1], shape.chunks)


def test_all_shapes_are_recorded_the_largest_first_before_the_decodes_on_pad_alone() -> None:
    model, capture = Successor(), Replayed()
    made = executor(model, capture)
    assert capture.widths == [112, 112, 64, 64, 12, 8, 4, 2, 1]
    assert all(model.only_pads)
    assert recorded(made) == SHAPES


def test_a_step_goes_to_the_first_shape_that_holds_it_with_pad_behind_decodes_and_prompts() -> None:
    model, capture = Successor(), Replayed()
    made = executor(model, capture)
    result = made.execute(mixed())
    assert capture.mixed == [64]
    assert result.tokens.tolist() == [6, 7, 3, 15]
    inputs, rest = model.seen[-1], 64 - 8 - 8
    assert inputs.positions_T.tolist() == [20, 21, *[PAD] * 6, 0, 1, 2, 0, 1, 2, 3, 4, *[PAD] * rest]
    assert inputs.tokens_T.tolist() == [5, 6, *[0] * 6, 0, 1, 2, 10, 11, 12, 13, 14, *[0] * rest]
    runs = inputs.runs
    assert (runs.run_count, runs.decode_count) == (21, 8)
    assert runs.starts_R.tolist() == [20, 21, *[PAD] * 6, 0, 0, *[PAD] * 11]
    assert runs.slots_R.tolist() == [0, 1, *[PAD] * 6, 2, 3, *[PAD] * 11]
    assert runs.context_R.tolist() == [21, 22, *[0] * 6, 3, 5, *[0] * 11]
    assert runs.page_table_RP[:, 0].tolist() == [30, 31, *[PAD] * 6, 32, 33, *[PAD] * 11]
    assert runs.offsets[runs.decode_count] == 8


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (mixed(0, (50,)), 64),
        (mixed(0, (57,)), 112),
        (mixed(9, (3,)), 64),
        (mixed(9, (60,)), 112),
        (mixed(2, (16, 1, 1, 1), taps=5), 64),
    ],
)
def test_the_size_follows_from_tokens_and_decodes(plan: StepPlan, size: int) -> None:
    capture = Replayed()
    executor(Successor(), capture).execute(plan)
    assert capture.mixed == [size]


def test_a_step_that_no_shape_holds_is_launched_without_padding() -> None:
    plan = mixed(0, (50,), taps=40)
    model, capture = Successor(), Replayed()
    made = executor(model, capture)
    count = len(model.seen)
    made.execute(plan)
    assert not capture.replays
    assert len(model.seen) == count + 1
    assert model.seen[-1].runs.run_count == plan.run_count
    assert made.steps_by_form == {GRAPH: 0, **dict.fromkeys(OUTSIDE, 0), "unrecorded": 1}


def test_a_step_outside_of_all_shapes_has_the_reason_that_comes_first() -> None:
    shapes = recorded_shapes(256, 8192, verify_runs=True)
    assert outside((), 5, 1, 0) == outside((), 5, 0, 0) == "unrecorded"
    assert outside(recorded_shapes(256, 0, verify_runs=True), 5, 1, 0) == "unrecorded", "decodes alone are recorded"
    assert outside(shapes, 600, 0, 0) == "decodes"
    assert outside(shapes, 2049, 17, 0) == "tokens"
    assert outside(shapes, 2048, 17, 1) == "prompts"
    assert outside(shapes, 2048, 16, 1) == "drafts"
    assert outside(shapes, 2048, 16, 0) == "unrecorded"


def test_shapes_with_drafts_hold_them_next_to_all_decodes_and_next_to_sixteen_prompts() -> None:
    shapes = recorded_shapes(256, 8192, verify_runs=True)
    assert [shape.forward for shape in shapes if shape.verifies][:2] == [False, True]
    assert len([shape for shape in shapes if shape.verifies]) <= 38, "each of them takes three steps at start"

    def held(decodes: int, verified: list[int], prompts: list[int]) -> bool:
        return any(shape.forward and shape.holds(decodes, prompts, len(prompts), verified) for shape in shapes)

    assert held(240, [4] * 16, [])
    assert held(240, [4] * 16, [64] * 16)
    assert held(0, [17], [7])
    assert not held(0, [2] * 17, [])
    assert not held(0, [5] * 13, []), "65 tokens"
    assert not any(shape.verifies and shape.holds(1, [5], 0) for shape in shapes), "no state to keep"


def test_verify_runs_and_prompts_are_one_graph_with_pad_before_the_one_and_behind_the_other() -> None:
    model, capture = Successor(), Replayed()
    made = TorchExecutor(model, plan_arena(model.spec, 200_000), SIZES, capture=capture, verify_runs=True)
    made.record_graphs()
    runs = [(0, 20, [5], 0, True), (1, 30, [6, 7, 9], 1, True), (2, 0, [10, 11], 2, True)]
    plan = plans.plan(runs, decode_count=1, admissions=[plans.admission(row, [1]) for row in range(3)])
    noted: list[list[list[int]]] = []

    def note(*_: object) -> None:
        """The states are replayed from the same memory afterwards."""
        seen = model.seen[-1]
        numbers = seen.tokens_T, seen.positions_T, seen.runs.slots_R, seen.runs.context_R
        noted.append([one.tolist() for one in numbers])

    made.observer = note
    result = made.execute(replace(plan, verify_count=1))
    assert capture.mixed == [112, 13], "the step, and the states"
    assert result.tokens.tolist() == [6, 8, 12]
    assert result.verified == {1: (7, 8)}
    runs_of = model.seen[-1].runs
    [[tokens, positions, slots, contexts]] = noted
    assert (runs_of.decode_count, runs_of.verify_count, runs_of.run_count) == (8, 12, 33)
    assert tokens[:15] == [5, *[0] * 7, 6, 7, 9, 10, 11, 0, 0]
    assert positions[:15] == [20, *[PAD] * 7, 30, 31, 32, 0, 1, PAD, PAD]
    assert slots == [0, *[PAD] * 7, *[PAD] * 11, 1, 2, *[PAD] * 12]
    assert contexts == [21, *[0] * 18, 33, 2, *[0] * 12]
    assert runs_of.log is not None
    assert (runs_of.log.first, runs_of.log.rows) == (8, 64)


def test_recorded_or_not_the_tokens_are_the_same_and_the_same_rows_are_known_afterwards() -> None:
    steps: list[Callable[[], StepPlan]] = [
        mixed,
        lambda: mixed(4, (3,), unknown=True),
        lambda: mixed(3, (40, 2, 7), first=9),
        lambda: mixed(5, (5,), unknown=True),
    ]
    capture = Replayed()
    recorded, plain = executor(Successor(), capture), executor(Successor(), None)
    for step in steps:
        assert recorded.execute(step()).tokens.tolist() == plain.execute(step()).tokens.tolist()
    assert capture.mixed == [64] * 4
    assert torch.equal(recorded.batches.rows.chosen, plain.batches.rows.chosen)


def test_logprobs_of_a_prompt_come_from_the_tokens_of_its_run() -> None:
    plan = plans.plan(
        [(0, 20, [5], 0, True), (1, 0, [3, 4, 9], 1, True)],
        decode_count=1,
        admissions=[plans.admission(0, [1]), plans.admission(1, [3, 4, 9], prompt_logprobs=1)],
        prompt_logprob_runs=[1],
    )
    recorded, plain = executor(Successor(), Replayed()), executor(Successor(), None)
    one, other = (made.execute(plan).prompt_logprobs for made in (recorded, plain))
    assert one == other
    assert [len(entries) for entries in one.values()] == [2]


@pytest.mark.parametrize("name", ["starts", "slots", "lengths", "offsets", "fresh", "taps"])
def test_an_op_that_reads_a_list_of_the_host_is_refused(name: str) -> None:
    made = TorchExecutor(Successor(looks_at=name), plan_arena(Successor().spec, 200_000), SIZES, capture=Replayed())
    refused = made.record_graphs()
    assert refused is not None
    assert (
        "steps of 64 tokens with 8 decodes, of 64 tokens with 12 decodes, of 112 tokens with 8 decodes, "
        f"of 112 tokens with 12 decodes: an op reads Runs.{name}"
    ) in refused
    assert recorded(made) == ()
    assert made.execute(mixed()).tokens.tolist() == [6, 7, 3, 15], "it goes on without graphs"


def test_a_shape_that_cannot_be_recorded_costs_no_other_graph() -> None:
    capture = RunsOnce({64: torch.OutOfMemoryError("no memory for it")})
    made = executor(Successor(), capture)
    assert recorded(made) == SHAPES[2:]
    assert len(made.batches.shapes) == 2 + 5, "and none of the decodes"
    made.execute(mixed())
    assert capture.replays == [112], "padded to the next shape that has a graph"
    made.sleep(1)
    assert recorded(made) == ()
    capture.fails.clear()
    made.wake("weights")
    made.wake("kv_cache")
    assert recorded(made) == SHAPES, "after a sleep all are recorded again"


def test_without_a_recorder_that_keeps_addresses_steps_with_prompts_are_launched() -> None:
    model = Successor()
    made = executor(model, EagerCapture())
    made.execute(mixed())
    assert model.seen[-1].runs.run_count == 4


class ByAddress(RunsOnce):
    """Keeps nothing of the recorded function but its result. ``held``: whether what it read is alive."""

    def __init__(self, model: Successor) -> None:
        super().__init__()
        self._model = model
        self._read: list[weakref.ref[torch.UntypedStorage]] = []

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        replay = super().capture(run)
        inputs = self._model.seen[-1]
        for tensor in (inputs.positions_T, inputs.runs.starts_R, inputs.runs.slots_R, inputs.runs.context_R):
            self._read.append(weakref.ref(tensor.untyped_storage()))
        return replay

    def held(self) -> set[bool]:
        self._model.seen.clear()
        gc.collect()
        return {read() is not None for read in self._read}


def test_memory_that_a_graph_reads_by_address_lives_as_long_as_the_graph() -> None:
    model = Successor()
    capture = ByAddress(model)
    made = executor(model, capture)
    assert capture.held() == {True}
    made.graphs = None  # the control: their owner is gone
    assert capture.held() == {False}
