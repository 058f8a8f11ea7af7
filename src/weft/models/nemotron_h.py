"""Nemotron-H: each layer is one thing, Mamba-2, attention, a feed-forward with squared relu, or experts.

All four are called ``mixer``. Hub releases keep them under ``backbone.``, with each expert by itself
(``mixer.experts.3.up_proj.weight``); transformers saves under ``model.``, with the experts in two tensors.
Experts may work on a projection of the stream (``fc1_latent_proj``, ``fc2_latent_proj``), while the shared
one sees the stream itself. Source: transformers ``nemotron_h``.
"""

from __future__ import annotations

import torch

from weft.families.architecture import Architecture, Attention, Dense, Experts, Mamba2
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
    return parts.model(architecture, source, layers, final_norm="norm_f.weight",
                       embedding="embeddings.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    norm = Norm(source.tensor(f"{name}.norm.weight", hidden), eps)
    shape, feed = architecture.mixers[index], architecture.feed_forwards[index]
    if feed is not None:
        forward: DenseBlock | ExpertsBlock
        forward = (parts.dense(source, f"{name}.mixer", hidden, feed) if isinstance(feed, Dense)
                   else experts(source, feed, f"{name}.mixer", hidden))
        return DecoderLayer(mixer_norm=None, mixer=None, feed_norm=norm, feed_forward=forward)
    mixer: Mixer
    if isinstance(shape, Attention):
        mixer = parts.attention(architecture, source, shape, f"{name}.mixer")
    else:
        assert isinstance(shape, Mamba2)
        mixer = state_space.mamba2(source, shape, f"{name}.mixer", hidden, eps)
    return DecoderLayer(mixer_norm=norm, mixer=mixer, feed_norm=None, feed_forward=None)


def experts(source: TensorSource, shape: Experts, name: str, hidden: int) -> ExpertsBlock:
    """Also those of the head for multi-token prediction (``weft.models.mtp``)."""
    wide = shape.latent_width or hidden
    own = source.own_experts(shape.count)
    if source.has(f"{name}.experts.up_proj"):
        up = source.all_experts(f"{name}.experts.up_proj", len(own), shape.width, wide)
        down = source.all_experts(f"{name}.experts.down_proj", len(own), wide, shape.width)
    else:
        each = [f"{name}.experts.{expert}" for expert in own]
        up = source.experts([(f"{e}.up_proj.weight",) for e in each], shape.width, wide)
        down = source.experts([(f"{e}.down_proj.weight",) for e in each], wide, shape.width)
    router = Linear(source.tensor(f"{name}.gate.weight", shape.count, hidden, dtype=torch.float32))
    block = ExpertsBlock(
        shape, router, up, down,
        choice_bias=source.tensor(f"{name}.gate.e_score_correction_bias", shape.count, dtype=torch.float32))
    if shape.shared_width:
        block.shared = parts.dense(source, f"{name}.shared_experts", hidden,
                                   Dense(shape.shared_width, shape.activation, gated=False))
    if shape.latent_width:
        block.latent_in = source.linear([(f"{name}.fc1_latent_proj.weight", wide)], hidden)
        block.latent_out = source.linear([(f"{name}.fc2_latent_proj.weight", hidden)], wide)
    return block
