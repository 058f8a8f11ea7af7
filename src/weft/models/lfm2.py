"""LFM2 and LFM3: short convolutions with some layers of attention, in LFM3 also over a window.

Their names are their own: ``operator_norm`` and ``ffn_norm`` around a layer; ``w1``, ``w3``, ``w2`` for gate,
up and down; ``out_proj`` for LFM2's attention output; ``embedding_norm`` for the final norm (which comes
after the last layer, not the embedding). LFM3 may norm what comes out of a layer too, and names its attention
as others do. LFM2-MoE is LFM2 with experts behind its first layers. Sources: transformers ``lfm2``,
``lfm2_moe``, ``lfm3``.
"""

from __future__ import annotations

import torch

from weft.families.architecture import Architecture, Attention, Dense, Experts, FeedForward, ShortConv
from weft.models import block_readers as parts
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm, SwiGlu
from weft.models.blocks.short_conv import ShortConvBlock
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer, Mixer
from weft.models.weights import TensorSource

NAMES = ("w1", "w3", "w2")
"""Of gate, up and down."""


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, final_norm="embedding_norm.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape, feed = architecture.mixers[index], architecture.feed_forwards[index]
    mixer: Mixer
    if isinstance(shape, Attention):
        if architecture.family == "lfm3":
            mixer = parts.attention(architecture, source, shape, f"{name}.self_attn")
        else:
            mixer = parts.attention(architecture, source, shape, f"{name}.self_attn", out="out_proj",
                                    norms=("q_layernorm", "k_layernorm"))
    else:
        assert isinstance(shape, ShortConv)
        mixer = _conv(source, shape, f"{name}.conv", hidden)
    outer: list[Norm | None] = [None, None]
    if architecture.sandwich_norms:
        outer = [Norm(source.tensor(f"{name}.{part}.weight", hidden), eps)
                 for part in ("post_operator_norm", "post_ffn_norm")]
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.operator_norm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.ffn_norm.weight", hidden), eps),
        feed_forward=_feed_forward(source, feed, f"{name}.feed_forward", hidden),
        mixer_out_norm=outer[0], feed_out_norm=outer[1])


def _feed_forward(source: TensorSource, shape: FeedForward | None, name: str,
                  hidden: int) -> SwiGlu | ExpertsBlock:
    if isinstance(shape, Dense):
        return parts.swiglu(source, name, hidden, shape.width, names=NAMES)
    assert isinstance(shape, Experts)
    gate_up, down = parts.gated_experts(source, f"{name}.experts", hidden, shape, names=NAMES)
    bias = None
    if shape.choice_bias:
        bias = source.tensor(f"{name}.expert_bias", shape.count, dtype=torch.float32)
    router = source.tensor(f"{name}.gate.weight", shape.count, hidden)
    return ExpertsBlock(shape, Linear(router), gate_up, down, choice_bias=bias)


def _conv(source: TensorSource, shape: ShortConv, name: str, hidden: int) -> ShortConvBlock:
    width, bias = shape.channels, shape.bias
    return ShortConvBlock(
        shape,
        source.linear([(f"{name}.in_proj.weight", 3 * width)], hidden,
                      source.tensor(f"{name}.in_proj.bias", 3 * width) if bias else None),
        conv=source.tensor(f"{name}.conv.weight", width, 1, shape.conv_kernel).squeeze(1),
        conv_bias=source.tensor(f"{name}.conv.bias", width) if bias else None,
        out=source.linear([(f"{name}.out_proj.weight", hidden)], width,
                          source.tensor(f"{name}.out_proj.bias", hidden) if bias else None))
