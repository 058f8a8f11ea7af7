"""The executor around a model that only says what it was shown."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.arena_fills import fill_frames
from tests.support.graph_steps import EagerCapture, dummy_step
from tests.unit.runner import plans
from weft.config import Sizes
from weft.memory.frames.plan import plan_arena
from weft.runner import torch_executor
from weft.runner.torch_executor import TorchExecutor
from weft.spec import ModelSpec, attention
from weft.tensor.device import current as current_device
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD

VOCAB = 50
SIZES = Sizes(max_model_len=1024, rows_max=4, step_tokens_max=600, queue_max=4, memory_bytes=10**6)


class Successor:
    """Thinks that after token t comes t + 1; ``asked`` counts the rows of each call for logits."""

    def __init__(self) -> None:
        self.spec = ModelSpec("successor", VOCAB, 1, 1024, "float32", (attention(1, 16),))
        self.asked: list[int] = []

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        assert caches[0].k is not None
        return inputs.asked_of(inputs.tokens_T[:, None].float())

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        self.asked.append(hidden_XD.shape[0])
        return torch.nn.functional.one_hot((hidden_XD[:, 0].long() + 1) % VOCAB, VOCAB).float() * 3


@pytest.fixture
def model() -> Successor:
    return Successor()


@pytest.fixture
def executor(model: Successor) -> TorchExecutor:
    return TorchExecutor(model, plan_arena(model.spec, 200_000), SIZES)


def test_only_runs_that_sample_get_a_token_and_only_their_logits_are_made(executor, model):
    step = plans.plan(
        [(0, 9, [11], PAD, True), (1, 0, [1, 2, 3], PAD, False), (2, 0, [4, 5], PAD, True)],
        decode_count=1,
        admissions=[plans.admission(row, [1]) for row in range(3)],
    )
    result = executor.execute(step)
    assert result.tokens.tolist() == [12, PAD, 6]
    assert model.asked == [2]
    assert result.device_s > 0


def test_a_step_without_runs_still_clears_rows_and_zeroes_frames(executor, model):
    executor.execute(
        plans.plan([(0, 0, [1], PAD, True)], admissions=[plans.admission(0, [1])], table_writes=[(0, 0, 3)])
    )
    fill_frames(executor.arena, range(executor.arena.plan.frame_count), 7)
    result = executor.execute(plans.plan(rows_cleared=[0], zero_frames=[2]))
    assert result.tokens.size == 0
    assert executor.batches.pages_of(0) == []
    arena = executor.arena.plan
    frames = executor.arena.buffer.view(arena.frame_count, arena.frame_bytes)
    assert [frame for frame in range(arena.frame_count) if not frames[frame].any()] == [2]


@pytest.mark.parametrize("slice_tokens", [1, 128, 1000])
def test_prompt_logits_are_made_in_slices_that_change_nothing(executor, model, monkeypatch, slice_tokens):
    monkeypatch.setattr(torch_executor, "PROMPT_LOGITS_TOKENS", slice_tokens)
    tokens = [i % VOCAB for i in range(300)]
    tokens[200] = 3
    step = plans.plan(
        [(0, 0, tokens, PAD, True)], prompt_logprob_runs=[0], admissions=[plans.admission(0, tokens, prompt_logprobs=1)]
    )
    found = executor.execute(step).prompt_logprobs[0]
    assert len(found) == 299
    assert [entry.token for entry in found] == tokens[1:]
    surprised = [i for i, entry in enumerate(found) if entry.rank != 0]
    assert surprised == [199, 200]
    assert max(model.asked) == min(slice_tokens, 299)


def test_the_observer_sees_the_logits_before_anything_is_done_to_them(model):
    seen: list[torch.Tensor] = []
    executor = TorchExecutor(
        model, plan_arena(model.spec, 200_000), SIZES, observer=lambda plan, logits: seen.append(logits.clone())
    )
    step = plans.plan([(0, 0, [1], PAD, True)], admissions=[plans.admission(0, [1], logit_bias={9: 100.0})])
    assert executor.execute(step).tokens.tolist() == [9]
    assert seen[0].argmax().item() == 2
    assert seen[0].max().item() == 3.0


def test_logprobs_are_keyed_by_run_and_not_by_place_among_the_sampling_runs(executor):
    step = plans.plan(
        [(0, 0, [1, 2], PAD, False), (1, 0, [4], PAD, True)],
        admissions=[plans.admission(0, [1, 2, 3]), plans.admission(1, [4], logprobs=1)],
    )
    assert list(executor.execute(step).logprobs) == [1]


def test_closing_frees_the_arena_and_may_be_done_twice(executor):
    executor.close()
    executor.close()
    assert executor.arena.buffer.numel() == 0


def test_rows_carry_sampling_from_admission_to_later_steps(executor):
    """Greedy with a frequency penalty: each token the row made is counted by the executor itself."""
    admission = plans.admission(0, [1], frequency_penalty=2.0, logit_bias={30: 2.5})
    made = executor.execute(plans.plan([(0, 0, [1], PAD, True)], admissions=[admission])).tokens.tolist()
    for position in range(1, 4):
        result = executor.execute(plans.plan([(0, position, [1], PAD, True)], decode_count=1))
        made += result.tokens.tolist()
    assert made == [2, 30, 2, 30]
    assert np.array(made).dtype == np.int64


def test_everything_is_launched_with_the_executors_device_as_the_current_one(model, monkeypatch):
    """Triton and graphs go by the current device, which need not be that of the engine (cuda:1)."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr(torch_executor, "current", current)
    executor = TorchExecutor(model, plan_arena(model.spec, 200_000), SIZES, capture=EagerCapture())
    forward, seen = model.forward, []
    model.forward = lambda *args: (seen.append(list(entered)), forward(*args))[1]
    executor.execute(plans.plan([(0, 0, [1, 2], PAD, True)], admissions=[plans.admission(0, [1, 2])]))
    executor.record_graphs()
    dummy_step(executor, 2)
    executor.graphs.forget()
    dummy_step(executor, 2)
    assert seen == [[executor.arena.device]] * 3
    assert current_device(torch.device("cpu")).__class__ is contextlib.nullcontext
