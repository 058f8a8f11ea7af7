"""Which steps go to a graph, how they are padded, and what a graph may look at: with fakes that record."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.runner import plans
from weft.config import Sizes
from weft.memory.frames.plan import plan_arena
from weft.runner.graphs import EagerCapture, Replay, Untold, decode_widths
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.plan import StepPlan
from weft.spec import ModelSpec, attention
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


def executor(model: Successor, capture: Recording | EagerCapture) -> TorchExecutor:
    return TorchExecutor(model, plan_arena(model.spec, 200_000), SIZES, capture=capture)


def decodes(count: int, first: int = 5, unknown: bool = False) -> StepPlan:
    return plans.plan([(row, 20 + row, [PAD if unknown else first + row], PAD, True) for row in range(count)],
                      decode_count=count, admissions=[plans.admission(row, [1]) for row in range(count)],
                      table_writes=[(row, 1, 30 + row) for row in range(count)])


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
    assert inputs.runs.page_table_RP[:, 1].tolist() == ([30 + row for row in range(running)]
                                                        + [PAD] * (width - running))


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
    step = plans.plan([(0, 20, [5], PAD, True), (1, 0, [1, 2, 3], PAD, True)], decode_count=1,
                      admissions=[plans.admission(row, [1]) for row in range(2)])
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
        capture: Recording | EagerCapture, recorded: bool) -> None:
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
    assert made.graphs is not None
    assert not made.graphs.recorded
    assert made.execute(decodes(3)).tokens.tolist() == [6, 7, 8], "it goes on without graphs"
    always_the_same = executor(Successor(looks_at="lengths"), Recording())
    assert always_the_same.record_graphs() is None
    computed_each_time = executor(Successor(looks_at=name), EagerCapture())
    assert computed_each_time.record_graphs() is None


def test_untold_has_a_length_and_nothing_else() -> None:
    untold = Untold("starts", 3)
    assert len(untold) == 3
    for read in (lambda: untold[0], lambda: list(untold), lambda: max(untold), lambda: 5 in untold):
        with pytest.raises(RuntimeError, match="starts"):
            read()


def test_asleep_there_are_no_graphs_and_awake_they_are_recorded_anew() -> None:
    model, capture = Successor(), Recording()
    made = executor(model, capture)
    made.record_graphs()
    made.sleep(1)
    assert made.graphs is not None
    assert not made.graphs.recorded
    made.wake("weights")
    assert not made.graphs.recorded
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
    made.dummy_step(7)
    assert capture.replays == ([8] if recorded else [])
    assert len(model.seen[-1].positions_T) == (8 if recorded else 7)
    assert model.only_pads[-1]
    assert torch.equal(before, made.arena.buffer)
