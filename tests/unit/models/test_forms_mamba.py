"""The Mamba families as they lie on the hub, as transformers saves them, and as it holds them: one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.checkpoints import checkpoint, reference
from tests.unit.models.test_saved_and_released_forms import Tensors, logits, reformed
from weft.models.loading import load_model


@pytest.mark.parametrize(
    ("name", "saved", "held"),
    [
        ("nemotron_h_moe", "backbone.layers.1.mixer.experts.7.up_proj.weight", "model.layers.1.mixer.experts.up_proj"),
        (
            "jamba",
            "model.layers.0.feed_forward.experts.3.gate_proj.weight",
            "model.layers.0.feed_forward.experts.gate_up_proj",
        ),
        (
            "zamba2",
            "model.layers.1.shared_transformer.self_attn.o_proj.weight",
            "model.layers.2.shared_transformer.self_attn.o_proj.weight",
        ),
    ],
)
def test_what_is_saved_and_what_is_held_in_memory_are_the_same_model(
    name: str, saved: str, held: str, tmp_path: Path
) -> None:
    """Experts one by one or stacked, a prefix or the other, a shared block once or in each layer."""
    memory = reference(name).state_dict()
    assert held in memory
    assert saved in load_file(checkpoint(name) / "model.safetensors")
    loaded = load_model(reformed(name, tmp_path / "held", memory))
    assert loaded.warnings == ()
    assert torch.equal(logits(loaded), logits(load_model(checkpoint(name))))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba", "nemotron_h"])
@pytest.mark.parametrize("prefix", ["backbone.", "model.", ""])
def test_a_model_without_embed_tokens_is_found_under_each_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    def renamed(tensors: Tensors) -> Tensors:
        return {
            prefix + key.removeprefix("backbone.") if key.startswith("backbone.") else key: tensor
            for key, tensor in tensors.items()
        }

    tensors = load_file(checkpoint(name) / "model.safetensors")
    assert "backbone.embeddings.weight" in tensors
    loaded = load_model(reformed(name, tmp_path / "renamed", renamed(tensors)))
    assert loaded.warnings == ()
    assert torch.equal(logits(loaded), logits(load_model(checkpoint(name))))
