"""Mamba, Falcon-Mamba and Mamba-2: a mixer in every layer, and nothing else. No attention, so no KV at all.

Names are those of the original code. Sources: transformers ``mamba``, ``falcon_mamba``, ``mamba2``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, FeedForward, Mamba1, Mamba2, Mixer
from weft.models.block_readers import BlockReader
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        inside = f"{name}.mixer"
        return DecoderLayer(read.norm(f"{name}.norm"), read.mixer(mixer, {Mamba1: inside, Mamba2: inside}),
                            None, None)

    return read.model(layer, final_norm="norm_f", embedding="embeddings")
