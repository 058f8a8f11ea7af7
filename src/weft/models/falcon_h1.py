"""Falcon-H1: attention and Mamba-2 in parallel in every layer, and a factor at every turn.

Every layer has KV pages and a state. The factors (muP multipliers, fixed before training) stay factors on
activations: folded into weights they would round them once more, and could not be folded into quantised ones.
Only the key's is part of the attention scale. Source: transformers ``falcon_h1``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Dense, Parallel
from weft.models import block_readers as parts
from weft.models import state_space
from weft.models.blocks.linear import Norm
from weft.models.blocks.parallel import ParallelBlock
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, final_norm="final_layernorm.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape, feed = architecture.mixers[index], architecture.feed_forwards[index]
    assert isinstance(shape, Parallel)
    assert isinstance(feed, Dense)
    mixer = ParallelBlock(shape, parts.attention(architecture, source, shape.attention, f"{name}.self_attn"),
                          state_space.mamba2(source, shape.mamba, f"{name}.mamba", hidden, eps))
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.pre_ff_layernorm.weight", hidden), eps),
        feed_forward=parts.dense(source, f"{name}.feed_forward", hidden, feed))
