"""Attention of MiniCPM-SALA sees blocks of long texts, and each number of its ``sparse_config`` counts.

The controls of its comparison with the reference: a length, a pooling or a choice that is wrong would move
its logits far beyond the tolerance.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import reference
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import TOLERANCE, loaded, prompt
from tests.support.minicpm_sala import MiniCPMSALAForCausalLM

TOKENS = prompt(300, seed=7)
DENSE = 90
"""``dense_len`` of the checkpoint."""


@torch.inference_mode()
def said(tokens: list[int] = TOKENS, **sparse: Any) -> torch.Tensor:
    """[tokens, vocab] of the reference with ``sparse`` in place of its own numbers."""
    model = reference("minicpm_sala")
    assert isinstance(model, MiniCPMSALAForCausalLM)
    other = copy.copy(model.config)
    other.sparse_config = model.config.sparse_config | sparse
    for layer in model.model.layers:
        layer.self_attn.config = other
    try:
        return model(torch.tensor([tokens])).logits[0]
    finally:
        for layer in model.model.layers:
            layer.self_attn.config = model.config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topk", 5),
        ("topk", 7),
        ("init_blocks", 0),
        ("window_size", 12),
        ("block_size", 24),
        ("kernel_size", 12),
        ("kernel_stride", 2),
    ],
)
def test_another_number_of_the_configuration_is_another_answer(key: str, value: int) -> None:
    apart = (said(**{key: value}) - said()).abs().amax(-1)
    assert apart[: DENSE - 1].max() < TOLERANCE
    assert apart[DENSE:].max() > 100 * TOLERANCE


def test_a_text_is_seen_whole_until_it_has_dense_len_tokens_and_never_looks_ahead() -> None:
    driver = ModelDriver(loaded("minicpm_sala").model, sequences=1, length=300)
    [first], [second] = driver.step((0, TOKENS[:200])), driver.step((0, TOKENS[200:]))
    ours, dense = torch.cat((first, second)), said(dense_len=1000)
    apart = (ours - dense).abs().amax(-1)
    assert apart[: DENSE - 1].max() < TOLERANCE
    assert apart[DENSE:].max() > 100 * TOLERANCE
    assert (ours - said()).abs().max() < TOLERANCE
    assert (said()[:200] - said(TOKENS[:200])).abs().max() < TOLERANCE
