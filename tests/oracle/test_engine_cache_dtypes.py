"""KV and states in fewer bits: near what they stand for, and inside a dtype nothing else changes anything.

Narrow KV is compared with transformers that reads back the same narrow numbers. The invariants are those of
the other files of this folder, cold against warm, whole against pieces, alone against in company, and so on,
at the same dtype on both sides.

Sums made in another order differ in the seventh digit, and once in a while such a difference falls on a
border between two narrow numbers, so that one number of thousands is stored as its neighbour. What is allowed
is therefore half of what the dtype itself does to the same logits, which all the roundings together do;
anything that rounds otherwise, or reads another number, is as far off as that or further (see the controls).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformers

from tests.fixtures.checkpoints import load_reference
from tests.oracle.serving import Answer, Serving, directory
from weft.request import SamplingParams
from weft.schedule.plan import StepPlan
from weft.spec import KV_DTYPES
from weft.tensor import gpu, native, rounding
from weft.tensor.few_bits import narrowed, quantized
from weft.tensor.layout import DTYPES

STEPS = 8
SHORT = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
KEPT = [
    ("qwen3_5", "fp8", "float16"),
    ("granite", "fp8", "bfloat16"),
    ("jamba", "int8", "float16"),
    ("mistral", "fp8", "float32"),
    ("kimi_linear", "int8", "float32"),
]
each_kept = pytest.mark.parametrize(("family", "kv", "state"), KEPT)


def text(name: int, length: int) -> list[int]:
    return np.random.default_rng(name).integers(3, 400, length).tolist()


PROMPTS = [text(1, 200), text(2, 70)]


def serve(family: str, kv: str, state: str, **more: object) -> Serving:
    return Serving(family, kv_dtype=kv, state_dtype=state, **more)  # type: ignore[arg-type]


@functools.cache
def _cold(family: str, kv: str, state: str, prompt: tuple[int, ...], steps: int) -> Answer:
    sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    return serve(family, kv, state).run([list(prompt)], sampling)[0]


def cold(family: str, kv: str, state: str, prompt: list[int], steps: int = STEPS) -> Answer:
    """The prompt alone, in one piece, on an engine that keeps nothing."""
    return _cold(family, kv, state, tuple(prompt), steps)


def gap(rows: torch.Tensor, others: torch.Tensor) -> float:
    found = (rows - others).abs().max() / others.abs().max()
    return float("inf") if found.isnan() else float(found)


def allowed(family: str, kv: str, state: str, prompt: list[int], steps: int = STEPS) -> float:
    """Half of what the dtypes do to the first logits."""
    narrow, wide = cold(family, kv, state, prompt, steps), cold(family, "auto", "float32", prompt)
    return gap(narrow.logits[:1], wide.logits[:1]) / 2


def assert_like_cold(
    family: str, kv: str, state: str, answers: list[Answer], prompts: list[list[int]], steps: int = STEPS
) -> None:
    """Up to the first choice that is too close to be one."""
    for answer, prompt in zip(answers, prompts, strict=True):
        other, most = cold(family, kv, state, prompt, steps), allowed(family, kv, state, prompt, steps)
        assert 1e-5 < most < 0.1
        best = other.logits.topk(2, dim=1).values
        close = ((best[:, 0] - best[:, 1]) < 2 * most * other.logits.abs().max()).nonzero().flatten().tolist()
        same = close[0] if close else steps
        assert answer.tokens[:same] == other.tokens[:same]
        assert gap(answer.logits[: same + 1], other.logits[: same + 1]) < most


@pytest.fixture
def torch_kernels() -> Iterator[None]:
    native.choose("torch")
    gpu.choose("torch")
    yield
    native.choose("auto")
    gpu.choose("auto")


@contextmanager
def narrow_cache(serving: Serving, kv: str) -> Iterator[None]:
    """transformers, whose cache gives back what pages of ``kv`` would."""
    original = transformers.DynamicCache.update
    dtype = DTYPES[KV_DTYPES[kv]]

    def back(x_BHTD: torch.Tensor, layer: int, part: int) -> torch.Tensor:
        if dtype == torch.int8:
            whole, scale = quantized(x_BHTD[0].transpose(0, 1))
            return (whole.float() * scale.float()[..., None]).transpose(0, 1)[None]
        scales = serving.executor._caches[layer].head_scales
        scale_H11 = torch.ones(1) if scales is None else scales[part, :, None, None].cpu()
        return narrowed(x_BHTD / scale_H11, dtype).float() * scale_H11

    def update(
        self: object, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *more: object, **named: object
    ) -> object:
        return original(self, back(k, layer_idx, 0), back(v, layer_idx, 1), layer_idx, *more, **named)

    transformers.DynamicCache.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        transformers.DynamicCache.update = original  # type: ignore[method-assign]


@torch.inference_mode()
def reference_logits(family: str, tokens: list[int], prompt_tokens: int) -> torch.Tensor:
    made = load_reference(directory(family))(torch.tensor([tokens]), use_cache=True).logits[0]
    return made[prompt_tokens - 1 : -1].float()


@pytest.mark.parametrize("kv", ["float16", "bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_narrow_kv_is_transformers_over_the_same_narrow_numbers(family: str, kv: str) -> None:
    serving = serve(family, kv, "float32")
    [answer] = serving.run([PROMPTS[1]], SHORT)
    tokens = PROMPTS[1] + answer.tokens
    with narrow_cache(serving, kv):
        same = reference_logits(family, tokens, len(PROMPTS[1]))
    exact = reference_logits(family, tokens, len(PROMPTS[1]))
    largest = exact.abs().max()
    error = (answer.logits - exact).abs().max() / largest
    assert 2e-5 < error < {"float16": 1e-3, "bfloat16": 6e-3, "fp8": 0.2, "int8": 2e-2}[kv]
    assert (answer.logits - same).abs().max() / largest < error / 2


@pytest.mark.parametrize("state", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_5", "jamba"])
def test_narrow_states_stay_near_the_wide_ones(family: str, state: str) -> None:
    """Logits of the first token; later ones may belong to other texts."""
    narrow, wide = (serve(family, "auto", kept).run([PROMPTS[0]], SHORT)[0] for kept in (state, "float32"))
    error = float((narrow.logits[0] - wide.logits[0]).abs().max() / wide.logits[0].abs().max())
    assert 1e-5 < error < {"float16": 1e-2, "bfloat16": 6e-2}[state]


@each_kept
def test_a_prefix_hit_a_donated_state_and_a_fork_change_nothing(family: str, kv: str, state: str) -> None:
    serving = serve(family, kv, state, cache=True)
    for cached in ([0, 0], [192, 64]):
        answers = [serving.run([prompt], SHORT)[0] for prompt in PROMPTS]
        assert_like_cold(family, kv, state, answers, PROMPTS)
        assert [answer.cached_tokens for answer in answers] == cached
    longer = [PROMPTS[0] + answers[0].tokens + text(9, 20), PROMPTS[0][:150] + text(10, 40)]
    found = [serving.run([prompt], SHORT)[0] for prompt in longer]
    assert_like_cold(family, kv, state, found, longer)
    assert found[0].cached_tokens >= 200


@each_kept
def test_chunks_and_company_change_nothing(family: str, kv: str, state: str) -> None:
    pieces = [serve(family, kv, state, step_tokens=80).run([prompt], SHORT)[0] for prompt in PROMPTS]
    assert_like_cold(family, kv, state, pieces, PROMPTS)
    together = serve(family, kv, state, pad_decode_to=8).run(PROMPTS, SHORT, stagger_steps=3)
    assert_like_cold(family, kv, state, together, PROMPTS)


@pytest.mark.parametrize(("family", "kv", "state"), KEPT[1:3])
def test_a_preemption_that_computes_all_again_changes_nothing(family: str, kv: str, state: str) -> None:
    """What decodes had made is made again by a prefill: states are rounded behind the same tokens."""
    arena, steps = serve(family, kv, state).arena, 60
    room = 24 * arena.page_bytes + 2 * arena.slot_bytes  # whole prompts, not their answers
    serving = serve(family, kv, state, memory_bytes=room, max_num_seqs=2)
    answers = serving.run(PROMPTS, SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True))
    assert sum(answer.preemptions for answer in answers) > 0
    assert_like_cold(family, kv, state, answers, PROMPTS, steps)


@pytest.mark.parametrize("state", ["float16", "bfloat16"])
@pytest.mark.usefixtures("torch_kernels")
def test_a_rounding_that_knows_more_than_the_tokens_is_noticed(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all of the above: bits that depend on how often a state was rounded so far."""
    kept = "granite", "auto", state
    for prompt in PROMPTS:
        allowed(*kept, prompt)
    honest, calls = rounding.state_key, iter(range(10**9))
    monkeypatch.setattr(rounding, "state_key", lambda position, layer: honest(position + next(calls), layer))
    pieces = [serve(*kept, step_tokens=80).run([prompt], SHORT)[0] for prompt in PROMPTS]
    assert all(
        gap(answer.logits, cold(*kept, prompt).logits) > allowed(*kept, prompt)
        for answer, prompt in zip(pieces, PROMPTS, strict=True)
    )


@pytest.mark.parametrize(("family", "kv"), [("granite", "int8"), ("qwen3_5", "fp8")])
def test_damaged_pages_of_a_cached_prefix_are_noticed(family: str, kv: str) -> None:
    """int8: one scale of one page. fp8: one page's bytes."""

    def damage(serving: Serving, plan: StepPlan) -> None:
        for cache in serving.executor._caches:
            if plan.admissions and cache.token_scales is not None:
                cache.token_scales[serving.pages_of_row[plan.admissions[0].row][2], 1] *= 4
            elif plan.admissions and cache.v is not None:
                cache.v[serving.pages_of_row[plan.admissions[0].row][2]].view(torch.uint8).fill_(0x40)

    serving = serve(family, kv, "float32", cache=True)
    serving.run([PROMPTS[0]], SHORT)
    serving._break = damage
    [answer] = serving.run([PROMPTS[0]], SHORT)
    assert answer.cached_tokens == 192
    gone = gap(answer.logits[:1], cold(family, kv, "float32", PROMPTS[0]).logits[:1])
    assert gone > allowed(family, kv, "float32", PROMPTS[0])
