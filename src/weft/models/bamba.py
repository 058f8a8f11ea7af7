"""Bamba and Falcon-H1: Mamba-2 and attention, in turns or in parallel in every layer.

The factors of Falcon-H1 (muP multipliers, fixed before training) stay factors on activations: folded into
weights they would round them once more, and could not be folded into quantised ones. Source: transformers
``bamba``, ``falcon_h1``.
"""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    FeedForward,
    Mamba2,
    Mixer,
    Parallel,
)
from weft.models.block_readers import BlockReader
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, Dense)
        attention, mamba = f"{name}.self_attn", f"{name}.mamba"
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"),
            (read.parallel(mixer, attention, mamba) if isinstance(mixer, Parallel)
             else read.mixer(mixer, {Attention: attention, Mamba2: mamba})),
            read.norm(f"{name}.pre_ff_layernorm"), read.dense(feed, f"{name}.feed_forward"))

    return read.model(layer, final_norm="final_layernorm")
