"""Nemotron-H: each layer is one thing, Mamba-2, attention, a feed-forward with squared relu, or experts.

All four are called ``mixer``. Hub releases keep them under ``backbone.``, with each expert by itself;
transformers saves under ``model.``, with the experts in two tensors. Source: transformers ``nemotron_h``.
"""

from __future__ import annotations

import torch

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    Mamba2,
    Mixer,
)
from weft.models.block_readers import BlockReader
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        norm, inside = read.norm(f"{name}.norm"), f"{name}.mixer"
        if feed is None:
            return DecoderLayer(norm, read.mixer(mixer, {Attention: inside, Mamba2: inside}), None, None)
        return DecoderLayer(None, None, norm, (read.dense(feed, inside) if isinstance(feed, Dense)
                                               else experts(read, feed, inside)))

    return read.model(layer, final_norm="norm_f", embedding="embeddings")


def experts(read: BlockReader, shape: Experts, name: str) -> ExpertsBlock:
    """Also those of the head for multi-token prediction (``weft.models.mtp``)."""
    block = read.experts(shape, name, router_dtype=torch.float32)
    if shape.shared_width:
        block.shared = read.dense(shape.shared, f"{name}.shared_experts")
    return block
