"""Speculation on real models: with drafts of any quality, the text without drafts, token for token.

On the C++ kernels a row of a product, of attention and of a recurrence does not depend on its company, so
there the logits are equal to the last bit. Torch's own products, its chunked recurrences and its attention
over a ring or a latent have other sums for other row counts: there tokens are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.fixtures.checkpoints import asked
from tests.fixtures.drafters import KINDS, AnswerDrafter, Kind
from tests.oracle.serving import Answer, Serving, directory
from tests.oracle.test_engine_prefix_cache import text
from weft.models.loading import LoadedModel, load_model
from weft.planning.layouts import draft_log_bytes
from weft.request import SamplingParams
from weft.runner import torch_executor
from weft.runner.staging import Staging
from weft.tensor import native
from weft.tensor.inputs import LayerCache, Runs

LENGTHS = (5, 40, 90)
NEW_TOKENS = 24
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NEW_TOKENS, ignore_eos=True, seed=11),
)
ON_THE_KERNELS = (
    "qwen3",
    "qwen3_5",
    "lfm2",
    "granite",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "granite_moe",
    "falcon_h1",
    "lfm2_moe",
    "nemotron_h_moe",
)
"""Every product, attention and recurrence is C++."""
IN_TORCH = ("jamba", "zamba2", "kimi_linear", "ling", "gpt_oss", "lfm3", "bamba", "qwen3_window")
"""Something is torch's: a latent or a ring of KV, a width that is no multiple of 16."""


@functools.cache
def loaded(family: str) -> LoadedModel:
    return load_model(directory(family))


class Speculating:
    """One engine for all kinds of drafts. ``run`` learns the truth for the sequences that it submits."""

    def __init__(self, family: str, **options: object) -> None:
        model = loaded(family)
        self.drafter = AnswerDrafter("empty", {}, model.spec.vocab_size)
        self.serving = Serving(family, model=model, drafter=self.drafter, **options)
        self._next = 0

    def run(
        self,
        kind: Kind,
        prompts: Sequence[list[int]],
        truth: Sequence[Answer],
        sampling: SamplingParams,
        **options: object,
    ) -> list[Answer]:
        self.drafter.kind = kind
        self.drafter.answers = {self._next + number: answer.tokens for number, answer in enumerate(truth)}
        self._next += len(prompts)
        return self.serving.run(prompts, sampling, **options)


@pytest.mark.parametrize("family", asked(*ON_THE_KERNELS, *IN_TORCH))
def test_drafts_change_no_token_and_on_the_kernels_no_bit(family: str) -> None:
    """Greedy with drafts of each kind. What a draft does to memory knows nothing of how its row is sampled:
    random drafts, of which some are right, stand for all where tokens are drawn."""
    prompts = [text(length, length) for length in LENGTHS]
    plain, speculating = Serving(family, model=loaded(family)), Speculating(family)
    for sampling in SAMPLINGS:
        truth = plain.run(prompts, sampling)
        for kind in KINDS if sampling.temperature == 0 else ("random",):
            answers = speculating.run(kind, prompts, truth, sampling)
            for answer, one in zip(answers, truth, strict=True):
                assert answer.tokens == one.tokens, f"{kind} drafts changed the text"
                gap = float((answer.logits - one.logits).abs().max())
                assert gap < 1e-4, f"{kind}: {gap}"
                if family in ON_THE_KERNELS:
                    assert gap == 0.0, f"{kind}: {gap}"
    assert speculating.drafter.accepted > 100


@functools.cache
def truth_of_controls() -> list[Answer]:
    return Serving("qwen3_5", model=loaded("qwen3_5")).run([text(n, n) for n in LENGTHS], SAMPLINGS[0])


def spoilt(monkeypatch: pytest.MonkeyPatch, change: Callable[[Runs, list[int]], None]) -> None:
    """An engine whose replay is changed has other logits."""
    prompts, truth = [text(length, length) for length in LENGTHS], truth_of_controls()
    monkeypatch.setattr(torch_executor, "replay", change)
    answers = Speculating("qwen3_5").run("random", prompts, truth, SAMPLINGS[0])
    gaps = [float((answer.logits - one.logits).abs().max()) for answer, one in zip(answers, truth, strict=True)]
    assert min(gaps) > 1e-3, "a wrong state shows nowhere"


def test_a_replay_of_one_token_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = torch_executor.replay
    spoilt(monkeypatch, lambda runs, counts, tables: replay(runs, [max(1, count - 1) for count in counts], tables))


def test_a_replay_of_one_token_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the report of a full rejection that commits what was never accepted."""
    replay = torch_executor.replay

    def one_more(runs: Runs, counts: list[int], tables: Staging) -> None:
        lengths = runs.lengths[runs.decode_count :][: runs.verify_count]
        replay(runs, [min(length, count + 1) for length, count in zip(lengths, counts, strict=True)], tables)

    spoilt(monkeypatch, one_more)


def test_a_replay_without_the_convolution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = torch_executor.replay
    windows: list[torch.Tensor] = []

    def without(runs: Runs, counts: list[int], tables: Staging) -> None:
        held = [window.clone() for window in windows]
        replay(runs, counts, tables)
        for window, before in zip(windows, held, strict=True):
            window.copy_(before)

    lay_out = torch_executor.TorchExecutor._lay_out

    def noting(executor: torch_executor.TorchExecutor, device: torch.device) -> list[LayerCache]:
        caches = lay_out(executor, device)
        windows[:] = [cache.state["conv"] for cache in caches if "conv" in cache.state]
        return caches

    monkeypatch.setattr(torch_executor.TorchExecutor, "_lay_out", noting)
    spoilt(monkeypatch, without)


def test_without_a_replay_the_text_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the report of a step without drafts that reads the state before accepted ones."""
    spoilt(monkeypatch, lambda runs, counts, tables: None)
    assert native.MISSING is None


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite", "mamba", "mamba2", "kimi_linear", "nemotron_h"])
def test_the_plan_counts_the_log_as_it_is(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes: set[float] = set()
    replay = torch_executor.replay

    def counting(runs: Runs, counts: list[int], tables: Staging) -> None:
        assert runs.log is not None
        token_bytes.add(runs.log.nbytes / runs.log.rows)
        replay(runs, counts, tables)

    monkeypatch.setattr(torch_executor, "replay", counting)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    speculating = Speculating(family)
    speculating.run("adversarial", [text(9, 9)], [Answer(tokens=list(range(6)))], sampling)
    assert token_bytes == {draft_log_bytes(speculating.serving.core.executor.model.spec)}
