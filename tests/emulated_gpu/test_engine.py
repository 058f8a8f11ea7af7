"""The engine as a user starts it, with ``--device cuda``: tokens of transformers, and no report."""

from __future__ import annotations

import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import answers, started
from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_models_against_transformers import expected
from weft.request import SamplingParams

PROMPTS = [[7], [300, 20, 411, 5, 123], list(range(3, 43))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def assert_tokens_of_transformers(family: str, prompts: list[list[int]], made: list[list[int]]) -> None:
    for prompt, tokens in zip(prompts, made, strict=True):
        wanted = expected(family, [*prompt, *tokens[:-1]])[-len(tokens):]
        assert tokens == wanted.argmax(-1).tolist(), f"{family}: prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("family", ["qwen3"])
def test_a_start_and_its_tokens(family: str) -> None:
    checkpoint(family)
    with emulated() as card, started(card, family) as engine:
        assert engine.info.device == "cuda:0 (emulated)"
        assert any("CUDA graphs" in note for note in engine.info.notes)
        made = answers(engine.core, PROMPTS, GREEDY)
        assert card.replays
    assert_tokens_of_transformers(family, PROMPTS, made)
