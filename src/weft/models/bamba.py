"""Bamba: Mamba-2 with a few layers of attention, half of each head rotary; SwiGLU in every layer.

Names as of Jamba and Falcon-H1: ``pre_ff_layernorm``, ``feed_forward``, ``final_layernorm``.
Source: transformers ``bamba``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Attention, Dense, Mamba2
from weft.models import block_readers as parts
from weft.models import state_space
from weft.models.blocks.linear import Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer, Mixer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, final_norm="final_layernorm.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape, feed = architecture.mixers[index], architecture.feed_forwards[index]
    assert isinstance(feed, Dense)
    mixer: Mixer
    if isinstance(shape, Attention):
        mixer = parts.attention(architecture, source, shape, f"{name}.self_attn")
    else:
        assert isinstance(shape, Mamba2)
        mixer = state_space.mamba2(source, shape, f"{name}.mamba", hidden, eps)
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.pre_ff_layernorm.weight", hidden), eps),
        feed_forward=parts.dense(source, f"{name}.feed_forward", hidden, feed))
