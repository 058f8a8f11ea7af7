"""The model is the one in the file: weft gives a text the perplexity that transformers gives on widened weights."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

from tests.real.reference import Original, perplexity_of
from tests.real.text import TEXT
from weft import Engine

WITHIN = 0.01


@pytest.fixture(scope="module")
def tokens(original: Original) -> list[int]:
    return original.encode(TEXT)[:400]


@pytest.fixture(scope="module")
def expected(original: Original, tokens: list[int]) -> tuple[float, float]:
    """The perplexity, and that of a model whose last layer adds nothing."""
    widened = original.widened()
    whole = perplexity_of(widened, tokens)
    for product in (widened.model.layers[-1].self_attn.o_proj, widened.model.layers[-1].mlp.down_proj):
        torch.nn.init.zeros_(product.weight)
    damaged = perplexity_of(widened, tokens)
    del widened
    gc.collect()
    return whole, damaged


def served(model: Path, tokens: list[int], dtype: str) -> float:
    with Engine(model=str(model), dtype=dtype, memory="64MiB", threads=1, speculate="off") as engine:
        [answer] = engine.generate([tokens], max_tokens=1, prompt_logprobs=0)
    logprobs = [one.logprob for one in answer.prompt_logprobs if one is not None]
    assert len(logprobs) == len(tokens) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_perplexity_of_a_text_is_that_of_the_widened_model(
    model: Path, tokens: list[int], expected: tuple[float, float], dtype: str
) -> None:
    assert len(tokens) == 400
    whole, damaged = expected
    assert 5 < whole < 40, "the text is neither known by heart nor noise to the model"
    assert served(model, tokens, dtype) == pytest.approx(whole, rel=WITHIN)
    assert damaged > whole * (1 + 2 * WITHIN), "one layer less would have been noticed"
