"""Jamba: Mamba-1 with RMS norms inside, some attention without positions, experts in every other layer.

Source: transformers ``jamba``.
"""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    Mamba1,
    Mixer,
)
from weft.models.block_readers import BlockReader
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, (Dense, Experts))
        inside = f"{name}.feed_forward"
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"),
            read.mixer(mixer, {Attention: f"{name}.self_attn", Mamba1: f"{name}.mamba"}),
            read.norm(f"{name}.pre_ff_layernorm"),
            (read.dense(feed, inside) if isinstance(feed, Dense)
             else read.experts(feed, inside, router="router.weight")))

    return read.model(layer, final_norm="final_layernorm")
