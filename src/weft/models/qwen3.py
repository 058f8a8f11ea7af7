"""Qwen3: attention in every layer, per-head norms on queries and keys, SwiGLU.

The plain case: no recurrent state at all. Source: transformers ``qwen3``.
"""

from __future__ import annotations

from weft.architecture import Architecture, Attention, Dense
from weft.models import parts
from weft.models.blocks.linear import Norm
from weft.models.decoder import CausalModel, DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers)


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    mixer, feed = architecture.mixers[index], architecture.feed_forwards[index]
    assert isinstance(mixer, Attention)
    assert isinstance(feed, Dense)
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps),
        mixer=parts.attention(architecture, source, mixer, f"{name}.self_attn"),
        feed_norm=Norm(source.tensor(f"{name}.post_attention_layernorm.weight", hidden), eps),
        feed_forward=parts.swiglu(source, f"{name}.mlp", hidden, feed.width))
