"""The engine as a user starts it, with ``--device cuda``: tokens of transformers, and no report."""

from __future__ import annotations

import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import answers, assert_tokens_of_transformers, started
from tests.fixtures.checkpoints import checkpoint

PROMPTS = [[7], [300, 20, 411, 5, 123], list(range(3, 43))]


@pytest.mark.parametrize("family", ["qwen3"])
def test_a_start_and_its_tokens(family: str) -> None:
    checkpoint(family)
    with emulated() as card, started(card, family) as engine:
        assert engine.info.device == "cuda:0 (emulated)"
        assert any("CUDA graphs" in note for note in engine.info.notes)
        made = answers(engine.core, PROMPTS)
        assert card.replays
    assert_tokens_of_transformers(family, PROMPTS, made)
