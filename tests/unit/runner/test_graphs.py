"""Which steps go to a graph, how they are padded, and what a graph may read.

The stand-ins behave as the hardware does: ``RunsOnce`` keeps nothing of the recorded function, as a graph
keeps addresses alone, and ``FakeCuda`` counts streams, pools and captures.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.graph_steps import EagerCapture, dummy_step
from tests.unit.runner import plans
from weft.config import Sizes
from weft.memory.frames.plan import plan_arena
from weft.runner.graph_shapes import GraphShape, decode_widths
from weft.runner.graphs import CudaCapture, Replay, UnreadableList
from weft.runner.step_graphs import GraphSet, SetName, StepGraphs
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.plan import StepPlan
from weft.spec import ModelSpec, attention
from weft.tensor import gpu
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD

VOCAB = 50
SIZES = Sizes(max_model_len=1024, rows_max=12, step_tokens_max=100, queue_max=4, memory_bytes=10**6)


class Successor:
    """Thinks that after token t comes t + 1, and keeps what it was shown."""

    def __init__(self, looks_at: str = "") -> None:
        self.spec = ModelSpec("successor", VOCAB, 1, 1024, "float32", (attention(1, 16),))
        self.looks_at = looks_at
        self.seen: list[StepInputs] = []
        self.only_pads: list[bool] = []
        """Of each call, when it came: what it was shown lies in memory that the next one overwrites."""

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        self.seen.append(inputs)
        runs = inputs.runs
        pads = (inputs.positions_T, runs.starts_R, runs.slots_R, runs.page_table_RP)
        self.only_pads.append(all(bool((part == PAD).all()) for part in pads) and not runs.context_R.any())
        if self.looks_at:
            list(getattr(inputs.runs, self.looks_at))
        return inputs.asked_of(inputs.tokens_T[:, None].float())

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.one_hot((hidden_XD[:, 0].long() + 1) % VOCAB, VOCAB).float() * 3


class Recording:
    """Runs what it records once, as a GPU is warmed up, and again at each replay, into the same memory."""

    reads_host = False

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.replays: list[int] = []

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        made = run()
        width = len(made)
        self.widths.append(width)

        def replay() -> torch.Tensor:
            self.replays.append(width)
            return made.copy_(run())

        return replay


class RunsOnce(Recording):
    """Runs what it records once and lets go of it; fails at the widths of ``fails``."""

    def __init__(self, fails: dict[int, Exception] | None = None) -> None:
        super().__init__()
        self.fails = fails or {}

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        hidden = run()
        width = len(hidden)
        if width in self.fails:
            raise self.fails[width]
        self.widths.append(width)

        def replay() -> torch.Tensor:
            self.replays.append(width)
            return hidden

        return replay


class FakeCuda:
    """The part of ``torch.cuda`` that recording uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[object] = []
        self.captures: list[dict[str, Any]] = []
        for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    class _Stream:
        def wait_stream(self, other: object) -> None:
            """Order is not what is tested."""

    def Stream(self, device: torch.device) -> object:
        self.streams.append(self._Stream())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> object:
        return self._Stream()

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def CUDAGraph(self) -> object:
        return object()

    def graph_pool_handle(self) -> object:
        return object()

    @contextlib.contextmanager
    def graph(self, graph: object, **options: Any) -> Iterator[None]:
        self.captures.append(options)
        yield


def executor(model: Successor, capture: Recording | EagerCapture) -> TorchExecutor:
    """That records decodes alone; ``test_mixed_graphs`` has the others."""
    return TorchExecutor(model, plan_arena(model.spec, 200_000), SIZES, capture=capture, mixed_tokens_max=0)


def widths_of(made: TorchExecutor) -> tuple[int, ...]:
    """The sizes to which decodes are padded, which are those of the table."""
    assert made.graphs is not None
    assert tuple(made.batches.shapes) == made.graphs.recorded()
    return tuple(shape.decodes for shape in made.batches.shapes if shape.decodes_alone)


def decodes(count: int, first: int = 5, unknown: bool = False) -> StepPlan:
    return plans.plan(
        [(row, 20 + row, [PAD if unknown else first + row], PAD, True) for row in range(count)],
        decode_count=count,
        admissions=[plans.admission(row, [1]) for row in range(count)],
        table_writes=[(row, 1, 30 + row) for row in range(count)],
    )


def test_widths_reach_every_row_and_waste_few() -> None:
    assert decode_widths(1) == (1,)
    assert decode_widths(12) == (1, 2, 4, 8, 12)
    assert decode_widths(256)[-2:] == (248, 256)
    assert len(decode_widths(256)) == 35
    assert decode_widths(10_000)[-1] == 512
    for widths in (decode_widths(rows) for rows in (3, 40, 300, 1000)):
        assert list(widths) == sorted(set(widths))


def test_all_widths_are_recorded_the_largest_first_on_pad_rows() -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    assert made.record_graphs() is None
    assert capture.widths == [12, 8, 4, 2, 1]
    assert model.only_pads == [True] * 5
    assert {inputs.runs.page_table_RP.shape[1] for inputs in model.seen} == {64}, "the table's full width"
    made.execute(decodes(3))
    assert model.only_pads[-1] is False


@pytest.mark.parametrize(("running", "width"), [(1, 1), (2, 2), (3, 4), (8, 8), (9, 12), (12, 12)])
def test_a_step_of_decodes_goes_to_the_next_width_with_pad_rows_behind_it(running: int, width: int) -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    made.record_graphs()
    result = made.execute(decodes(running))
    assert capture.replays == [width]
    assert result.tokens.tolist() == [6 + row for row in range(running)]
    inputs = model.seen[-1]
    assert inputs.positions_T.tolist() == [20 + row for row in range(running)] + [PAD] * (width - running)
    assert inputs.runs.context_R.tolist() == [21 + row for row in range(running)] + [0] * (width - running)
    assert inputs.runs.page_table_RP[:, 1].tolist() == (
        [30 + row for row in range(running)] + [PAD] * (width - running)
    )


def test_inputs_lie_at_the_same_addresses_at_every_replay() -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    made.record_graphs()
    recorded = {len(inputs.positions_T): inputs for inputs in model.seen}
    for first in (5, 20):
        made.execute(decodes(7, first))
        for name in ("slots_R", "context_R", "starts_R"):
            assert getattr(model.seen[-1].runs, name).data_ptr() == getattr(recorded[8].runs, name).data_ptr()
        assert model.seen[-1].positions_T.data_ptr() == recorded[8].positions_T.data_ptr()


def test_a_step_with_a_prompt_in_it_is_computed_without_a_graph() -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    made.record_graphs()
    step = plans.plan(
        [(0, 20, [5], PAD, True), (1, 0, [1, 2, 3], PAD, True)],
        decode_count=1,
        admissions=[plans.admission(row, [1]) for row in range(2)],
    )
    assert made.execute(step).tokens.tolist() == [6, 4]
    assert capture.replays == []
    assert model.seen[-1].runs.run_count == 2, "and without padding"


def test_without_recording_nothing_is_padded() -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    assert made.execute(decodes(3)).tokens.tolist() == [6, 7, 8]
    assert capture.replays == []
    assert model.seen[-1].runs.run_count == 3


@pytest.mark.parametrize("capture", [Recording(), EagerCapture()])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_decode_whose_token_is_not_known_is_fed_what_its_row_chose_last(
    capture: Recording | EagerCapture, recorded: bool
) -> None:
    model = Successor()
    made = executor(model, capture)
    if recorded:
        made.record_graphs()
    assert made.execute(decodes(3)).tokens.tolist() == [6, 7, 8]
    assert made.execute(decodes(3, unknown=True)).tokens.tolist() == [7, 8, 9]
    assert made.execute(decodes(2, unknown=True)).tokens.tolist() == [8, 9]


@pytest.mark.parametrize("name", ["starts", "slots"])
def test_an_op_that_reads_what_a_graph_would_freeze_is_named_and_nothing_is_recorded(name: str) -> None:
    model = Successor(looks_at=name)
    made = executor(model, Recording())
    said = made.record_graphs()
    assert said is not None
    assert f"Runs.{name}" in said
    assert widths_of(made) == ()
    assert made.execute(decodes(3)).tokens.tolist() == [6, 7, 8], "it goes on without graphs"
    always_the_same = executor(Successor(looks_at="lengths"), Recording())
    assert always_the_same.record_graphs() is None
    computed_each_time = executor(Successor(looks_at=name), EagerCapture())
    assert computed_each_time.record_graphs() is None


def test_an_unreadable_list_has_a_length_and_nothing_else() -> None:
    unreadable = UnreadableList("starts", 3)
    assert len(unreadable) == 3
    for read in (lambda: unreadable[0], lambda: list(unreadable), lambda: max(unreadable), lambda: 5 in unreadable):
        with pytest.raises(RuntimeError, match="starts"):
            read()


def test_asleep_there_are_no_graphs_and_awake_they_are_recorded_anew() -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    made.record_graphs()
    made.sleep(1)
    assert widths_of(made) == ()
    made.wake("weights")
    assert widths_of(made) == ()
    made.wake("kv_cache")
    assert capture.widths == [12, 8, 4, 2, 1] * 2
    assert made.execute(decodes(3)).tokens.tolist() == [6, 7, 8]
    assert capture.replays == [4]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_dummy_step_is_pad_rows_alone(recorded: bool) -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    if recorded:
        made.record_graphs()
    before = made.arena.buffer.clone()
    dummy_step(made, 7)
    assert capture.replays == ([8] if recorded else [])
    assert len(model.seen[-1].positions_T) == (8 if recorded else 7)
    assert model.only_pads[-1]
    assert torch.equal(before, made.arena.buffer)


def test_the_table_of_runs_that_a_graph_reads_by_address_lives_as_long_as_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step of decodes brings it, and nothing but the graphs' owner holds it."""
    monkeypatch.setattr(gpu, "fits", lambda *tensors: True)
    model = Successor()
    recorded = executor(model, RunsOnce())
    assert recorded.record_graphs() is None
    tables = [weakref.ref(inputs.runs.memo["device_runs"].offsets_R.untyped_storage()) for inputs in model.seen]
    model.seen.clear()
    gc.collect()
    assert [table() is None for table in tables] == [False] * 5
    recorded.sleep(1)
    gc.collect()
    assert [table() is None for table in tables] == [True] * 5, "and goes with the graphs"


def test_a_width_that_cannot_be_recorded_costs_no_other_width() -> None:
    model, capture = (
        Successor(),
        RunsOnce(
            {8: torch.OutOfMemoryError("no memory for it"), 12: RuntimeError("too wide"), 2: RuntimeError("too wide")}
        ),
    )
    partly = executor(model, capture)
    assert partly.record_graphs() == "batch sizes 2, 12: too wide; batch size 8: no memory for it"
    assert widths_of(partly) == (1, 4)
    partly.execute(decodes(2))
    assert capture.replays == [4], "padded to the next width that has a graph"
    assert partly.execute(decodes(7)).tokens.tolist() == [6 + row for row in range(7)]
    assert capture.replays == [4], "wider than all graphs: without one"
    dummy_step(partly, 7)
    assert capture.replays == [4]


def test_a_set_of_steps_that_cannot_be_recorded_is_named_and_costs_no_other_set() -> None:
    def forward(inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        if inputs.adapters is not None:
            raise RuntimeError("no room for factors")
        return inputs.tokens_T[:, None].float()

    shapes = [GraphShape.of_decodes(2)]
    table = torch.full((3, 1), PAD, dtype=torch.int32)
    graphs = StepGraphs(table, torch.zeros(3, dtype=torch.int64), shapes, Recording())
    names: tuple[SetName, ...] = ("base", "draft", "adapted")
    graphs.record(*(GraphSet(name, shapes, forward, []) for name in names))
    assert [graphs.recorded(name) for name in names] == [tuple(shapes), tuple(shapes), ()]
    assert graphs.refused_in_words() == "with adapters, batch size 2: no room for factors"


def test_a_kernel_that_asks_for_more_than_the_card_has_is_no_end_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ModuleType("triton.errors")
    errors.TritonError = type("TritonError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.errors", errors)
    out_of_resources = type("OutOfResources", (errors.TritonError,), {})
    partly = executor(Successor(), RunsOnce({12: out_of_resources("out of resource: shared memory")}))
    assert partly.record_graphs() == "batch size 12: out of resource: shared memory"
    assert widths_of(partly) == (1, 2, 4, 8)


def test_after_waking_the_reason_for_missing_graphs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    capture = RunsOnce()
    awake = executor(Successor(), capture)
    assert awake.record_graphs() is None
    awake.sleep(1)
    capture.fails[8] = RuntimeError("no memory for it")
    awake.wake("weights")
    with caplog.at_level(logging.WARNING, "weft"):
        awake.wake("kv_cache")
    assert "batch size 8: no memory for it" in caplog.text
    assert widths_of(awake) == (1, 2, 4, 12)


def test_all_widths_are_recorded_on_one_stream_into_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda", 0))
    for width in (8, 4, 2):
        capture.capture(lambda width=width: torch.zeros(width))
    assert len(cuda.streams) == 1
    assert {options["stream"] for options in cuda.captures} == set(cuda.streams)
    assert len({options["pool"] for options in cuda.captures}) == 1


def test_another_thread_cannot_end_a_recording_which_is_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, runs = FakeCuda(monkeypatch), []
    CudaCapture(torch.device("cuda", 0)).capture(lambda: runs.append(1) or torch.zeros(1))
    assert len(runs) == 2, "one run before the recording, and the recording"
    assert [options["capture_error_mode"] for options in cuda.captures] == ["thread_local"]
