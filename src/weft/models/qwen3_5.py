"""Qwen3.5, dense and mixture of experts: gated delta net with every fourth layer gated attention.

The projections of the delta layers are four tensors (``in_proj_qkv``, ``_z``, ``_b``, ``_a``) that become
one. Norm weights are stored as the distance from 1, except the gated norm of the delta layers. The layer
frame is shared with Qwen3-Next, which differs in how the delta projections are stored: see there.
Source: transformers ``qwen3_5`` and ``qwen3_5_moe``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.families.architecture import Architecture, Attention, Dense, Experts, GatedDelta
from weft.models import block_readers as parts
from weft.models.blocks.gated_delta import GatedDeltaBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer, Mixer
from weft.models.tensor_source import decay_of
from weft.models.weights import TensorSource

ReadProjection = Callable[[TensorSource, GatedDelta, str, int], Linear]
"""(source, shape, layer's name, hidden size) -> [rows of q k v z b a, hidden]."""


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    return build_hybrid(architecture, source, _projection)


def build_hybrid(architecture: Architecture, source: TensorSource, projection: ReadProjection) -> CausalModel:
    """The frame of Qwen3.5 and Qwen3-Next; ``projection`` reads a delta layer's input projection."""
    layers = [_layer(architecture, source, index, projection) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, plus_one=True)


def _projection(source: TensorSource, shape: GatedDelta, name: str, hidden: int) -> Linear:
    return source.linear([(f"{name}.in_proj_qkv.weight", 2 * shape.key_width + shape.value_width),
                          (f"{name}.in_proj_z.weight", shape.value_width),
                          (f"{name}.in_proj_b.weight", shape.v_heads),
                          (f"{name}.in_proj_a.weight", shape.v_heads)], hidden)


def _layer(architecture: Architecture, source: TensorSource, index: int,
           projection: ReadProjection) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape, feed = architecture.mixers[index], architecture.feed_forwards[index]
    mixer: Mixer
    if isinstance(shape, GatedDelta):
        mixer = _delta(source, shape, f"{name}.linear_attn", hidden, eps, projection)
    else:
        assert isinstance(shape, Attention)
        mixer = parts.attention(architecture, source, shape, f"{name}.self_attn", plus_one=True)
    assert isinstance(feed, (Dense, Experts))
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps, plus_one=True),
        mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.post_attention_layernorm.weight", hidden), eps, plus_one=True),
        feed_forward=(parts.swiglu(source, f"{name}.mlp", hidden, feed.width) if isinstance(feed, Dense)
                      else parts.qwen_experts(source, f"{name}.mlp", hidden, feed)))


def _delta(source: TensorSource, shape: GatedDelta, name: str, hidden: int, eps: float,
           projection: ReadProjection) -> GatedDeltaBlock:
    channels = 2 * shape.key_width + shape.value_width
    return GatedDeltaBlock(
        shape, projection(source, shape, name, hidden),
        conv=source.tensor(f"{name}.conv1d.weight", channels, 1, shape.conv_kernel).squeeze(1),
        decay=decay_of(source.tensor(f"{name}.A_log", shape.v_heads, dtype=torch.float32)),
        dt_bias=source.tensor(f"{name}.dt_bias", shape.v_heads, dtype=torch.float32),
        norm=source.tensor(f"{name}.norm.weight", shape.v_dim), norm_eps=eps,
        out=source.linear([(f"{name}.out_proj.weight", hidden)], shape.value_width))
