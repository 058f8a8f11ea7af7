"""Which steps of a Mamba-2 layer are clamped, and that prompts and single tokens agree on it.

transformers clamps the steps of a prompt from below to ``time_step_min`` in Nemotron-H and Zamba2, and the
steps of single tokens not at all. The model was trained without that bound (it is one of the initialisation),
so weft has only ``time_step_limit``, on both paths: see docs/models.md. Here the steps are made small enough
for the clamp to matter, and the control shows that it does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint, load_reference
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import prompt
from weft.models.loading import load_model

TOLERANCE = 1e-4
TOKENS = prompt(90, seed=6)


def with_small_steps(name: str, directory: Path, **config_changes: object) -> Path:
    """Checkpoint ``name`` with steps of a few 1e-4."""
    copy_checkpoint(checkpoint(name), directory, **config_changes)
    tensors = load_file(directory / "model.safetensors")
    shifted = {key: tensor - 7.5 if key.endswith("dt_bias") else tensor for key, tensor in tensors.items()}
    save_file(shifted, directory / "model.safetensors")
    return directory


def prefilled(directory: Path) -> torch.Tensor:
    return ModelDriver(load_model(directory).model, sequences=1, length=96).step((0, TOKENS))[0]


def token_by_token(directory: Path) -> torch.Tensor:
    driver = ModelDriver(load_model(directory).model, sequences=1, length=96)
    return torch.cat([driver.step((0, [token]))[0] for token in TOKENS])


@torch.inference_mode()
def by_transformers(directory: Path) -> torch.Tensor:
    return load_reference(directory)(torch.tensor([TOKENS])).logits[0].float()


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_small_steps_are_not_clamped_in_prompts_nor_in_single_tokens(name: str, tmp_path: Path) -> None:
    released = with_small_steps(name, tmp_path / "released", time_step_min=0.001)
    neutral = with_small_steps(name, tmp_path / "neutral", time_step_min=1e-30)
    wanted = by_transformers(neutral)
    assert (prefilled(released) - wanted).abs().max() < TOLERANCE
    assert (token_by_token(released) - wanted).abs().max() < TOLERANCE
    assert (by_transformers(released) - wanted).abs().max() > 100 * TOLERANCE  # the control


@pytest.mark.parametrize("name", ["bamba", "mamba2", "falcon_h1"])
def test_the_limits_that_a_checkpoint_states_hold_on_both_paths(name: str, tmp_path: Path) -> None:
    limited = with_small_steps(name, tmp_path / "limited", time_step_limit=[0.02, 0.1])
    wanted = by_transformers(limited)
    assert (prefilled(limited) - wanted).abs().max() < TOLERANCE
    assert (token_by_token(limited) - wanted).abs().max() < TOLERANCE
    free = with_small_steps(name, tmp_path / "free")
    assert (prefilled(free) - wanted).abs().max() > 100 * TOLERANCE  # the control


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "nemotron_h_moe", "jamba", "zamba2", "falcon_mamba"])
def test_bfloat16_weights_stay_near_float32(name: str) -> None:
    small = load_model(checkpoint(name), "bfloat16")
    assert small.spec.dtype == "bfloat16"
    [logits] = ModelDriver(small.model, sequences=1, length=96).step((0, TOKENS))
    similarity = torch.nn.functional.cosine_similarity(logits, by_transformers(checkpoint(name)), dim=-1)
    assert similarity.median().item() > 0.99
