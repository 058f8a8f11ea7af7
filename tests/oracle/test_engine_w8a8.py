"""With ``--quantize w8a8`` an answer does not depend on its company, to the last bit of its logprobs.

Inputs that are rounded magnify what rounding finds: a number one unit off in its last place may take another
code. So what other forms may leave to a tolerance is asked for exactly here, of the C++ kernels; torch, whose
own products differ by the number of rows, is asked for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from weft.api import Engine
from weft.models.blocks import linear
from weft.tensor import fused_block as chain
from weft.tensor import native
from weft.tensor.ops.linear import Matrix
from weft.tensor.weights.quantized import QuantizedWeight

EXACT = native.MISSING is None
Answers = list[tuple[list[int], list[float]]]


def text(name: int, length: int) -> list[int]:
    return np.random.default_rng(name).integers(3, 400, length).tolist()


SYSTEM = text(0, 140)
PROMPTS = [SYSTEM + text(1, 20), SYSTEM + text(2, 61), text(3, 37)]


def answers(groups: list[list[list[int]]], **config: object) -> tuple[Answers, int]:
    """To the last group, after the others; and how many prompt tokens were found in the cache."""
    with Engine(
        str(checkpoint("lfm2")), quantize="w8a8", memory="16MB", max_model_len=256, threads=1, **config
    ) as engine:
        for group in groups:
            done = engine.generate(group, progress=False, max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    return (
        [(one.tokens, [step.logprob for step in one.logprobs]) for one in done],
        sum(one.cached_tokens for one in done),
    )


def alone() -> Answers:
    return [answers([[prompt]], prefix_cache=False)[0][0] for prompt in PROMPTS]


def same(found: Answers, expected: Answers) -> bool:
    return found == expected if EXACT else [one[0] for one in found] == [one[0] for one in expected]


def test_company_chunks_and_prefix_hits_change_no_bit_of_an_answer() -> None:
    expected = alone()
    together, _ = answers([PROMPTS], prefix_cache=False)
    in_chunks, _ = answers([PROMPTS], prefix_cache=False, max_num_batched_tokens=48)
    from_cache, cached = answers([[PROMPTS[0]], PROMPTS])
    assert cached >= 128
    for found in (together, in_chunks, from_cache):
        assert same(found, expected)


def rounded_together(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same product, but with one scale for all rows of a step."""

    def shared(x: torch.Tensor, weight: Matrix, *others: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(weight, QuantizedWeight):
            return product(x, weight, *others)
        step = x.abs().amax().clamp_min(1e-6) / 127 if x.numel() else 1.0
        return product((x / step).round() * step, weight, *others)

    return shared


def test_inputs_that_were_rounded_with_their_company_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MOST_ROWS", 0)
    monkeypatch.setattr(linear, "product", rounded_together(linear.product))
    expected = alone()
    together, _ = answers([PROMPTS], prefix_cache=False)
    assert together != expected
    for (_, found), (_, wanted) in zip(together, expected, strict=True):
        assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) > 1e-3
