"""OLMo 3 and OLMo hybrid: norms on what comes out of an attention layer, and on all heads of q and k at once.

A delta layer of the hybrid is an ordinary pre-norm layer; its projections are six tensors (q, k, v, g, b, a)
that become one, and its norm has an epsilon of its own. Convolutions are three tensors in hub releases and
one inside transformers, whose save renames norms of attention layers on the way; all are read. Sources:
transformers ``olmo3`` and ``olmo_hybrid``.
"""

from __future__ import annotations

import torch

from weft.families.architecture import Architecture, Attention, Dense, GatedDelta
from weft.models import block_readers as parts
from weft.models.blocks.gated_delta import GatedDeltaBlock
from weft.models.blocks.linear import Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.tensor_source import decay_of
from weft.models.weights import TensorSource

DELTA_NORM_EPS = 1e-5
"""Of the gated norm in a delta layer, whatever config.json says for the others."""


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers)


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape, feed = architecture.mixers[index], architecture.feed_forwards[index]
    assert isinstance(feed, Dense)
    feed_forward = parts.swiglu(source, f"{name}.mlp", hidden, feed.width)

    def norm(saved: str, on_the_hub: str = "") -> Norm:
        stored = on_the_hub if source.has(f"{name}.{on_the_hub}.weight") else saved
        return Norm(source.tensor(f"{name}.{stored}.weight", hidden), eps)

    if isinstance(shape, GatedDelta):
        return DecoderLayer(
            mixer_norm=norm("input_layernorm", "attention_layer_norm"),
            mixer=_delta(source, shape, f"{name}.linear_attn", hidden),
            feed_norm=norm("post_attention_layernorm", "feedforward_layer_norm"), feed_forward=feed_forward)
    assert isinstance(shape, Attention)
    return DecoderLayer(
        mixer_norm=None, mixer=parts.attention(architecture, source, shape, f"{name}.self_attn"),
        mixer_out_norm=norm("post_attention_layernorm", "feedforward_layer_norm"),
        feed_norm=None, feed_forward=feed_forward, feed_out_norm=norm("post_feedforward_layernorm"))


def _delta(source: TensorSource, shape: GatedDelta, name: str, hidden: int) -> GatedDeltaBlock:
    key, value, heads = shape.key_width, shape.value_width, shape.v_heads
    widths = (("q", key), ("k", key), ("v", value), ("g", value), ("b", heads), ("a", heads))
    project = source.linear([(f"{name}.{part}_proj.weight", rows) for part, rows in widths], hidden)
    return GatedDeltaBlock(
        shape, project, conv=parts.qkv_conv(source, name, (key, key, value), shape.conv_kernel),
        decay=decay_of(source.tensor(f"{name}.A_log", heads, dtype=torch.float32)),
        dt_bias=source.tensor(f"{name}.dt_bias", heads, dtype=torch.float32),
        norm=source.tensor(f"{name}.o_norm.weight", shape.v_dim), norm_eps=DELTA_NORM_EPS,
        out=source.linear([(f"{name}.o_proj.weight", hidden)], value))
