"""Jamba: Mamba-1 with RMS norms inside, some attention without positions, experts in every other layer.

Experts are stored one by one or all in two tensors (see ``parts.gated_experts``). Source: transformers
``jamba``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Attention, Dense, Experts, FeedForward, Mamba1
from weft.models import block_readers as parts
from weft.models import state_space
from weft.models.blocks.dense import DenseBlock
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer, Mixer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, final_norm="final_layernorm.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape = architecture.mixers[index]
    mixer: Mixer
    if isinstance(shape, Attention):
        mixer = parts.attention(architecture, source, shape, f"{name}.self_attn")
    else:
        assert isinstance(shape, Mamba1)
        mixer = state_space.mamba1(source, shape, f"{name}.mamba", hidden)
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.pre_ff_layernorm.weight", hidden), eps),
        feed_forward=_feed_forward(source, architecture.feed_forwards[index], f"{name}.feed_forward", hidden))


def _feed_forward(source: TensorSource, shape: FeedForward | None, name: str,
                  hidden: int) -> DenseBlock | ExpertsBlock:
    if isinstance(shape, Dense):
        return parts.dense(source, name, hidden, shape)
    assert isinstance(shape, Experts)
    gate_up, down = parts.gated_experts(source, f"{name}.experts", hidden, shape)
    return ExpertsBlock(shape, Linear(source.tensor(f"{name}.router.weight", shape.count, hidden)), gate_up,
                        down)
