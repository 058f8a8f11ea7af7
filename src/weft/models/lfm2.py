"""LFM2: short convolutions with a few layers of attention.

Its names are its own: ``operator_norm`` and ``ffn_norm`` around a layer, ``w1``, ``w3``, ``w2`` for gate, up
and down, ``out_proj`` for the attention's output, and ``embedding_norm`` for the final norm (it is applied
after the last layer, not to the embedding). Source: transformers ``lfm2``.
"""

from __future__ import annotations

from weft.architecture import Architecture, Attention, Dense, ShortConv
from weft.models import parts
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.short_conv import ShortConvBlock
from weft.models.decoder import CausalModel, DecoderLayer, Mixer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, final_norm="embedding_norm.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape, feed = architecture.mixers[index], architecture.feed_forwards[index]
    assert isinstance(feed, Dense)
    mixer: Mixer
    if isinstance(shape, Attention):
        mixer = parts.attention(architecture, source, shape, f"{name}.self_attn", out="out_proj",
                                norms=("q_layernorm", "k_layernorm"))
    else:
        assert isinstance(shape, ShortConv)
        mixer = _conv(source, shape, f"{name}.conv")
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.operator_norm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.ffn_norm.weight", hidden), eps),
        feed_forward=parts.swiglu(source, f"{name}.feed_forward", hidden, feed.width,
                                  names=("w1", "w3", "w2")))


def _conv(source: TensorSource, shape: ShortConv, name: str) -> ShortConvBlock:
    width, bias = shape.channels, shape.bias
    return ShortConvBlock(
        shape,
        Linear(source.tensor(f"{name}.in_proj.weight", 3 * width, width),
               source.tensor(f"{name}.in_proj.bias", 3 * width) if bias else None),
        conv=source.tensor(f"{name}.conv.weight", width, 1, shape.conv_kernel).squeeze(1),
        conv_bias=source.tensor(f"{name}.conv.bias", width) if bias else None,
        out=Linear(source.tensor(f"{name}.out_proj.weight", width, width),
                   source.tensor(f"{name}.out_proj.bias", width) if bias else None))
