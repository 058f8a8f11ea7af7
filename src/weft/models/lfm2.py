"""LFM2 and LFM3: short convolutions with some layers of attention, in LFM3 also over a window.

``embedding_norm`` is the final norm: it comes after the last layer, not the embedding. LFM3 may norm what
comes out of a layer too, and names its attention as others do. Sources: transformers ``lfm2``, ``lfm2_moe``,
``lfm3``.
"""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    Mixer,
    ShortConv,
)
from weft.models import layer as layers
from weft.models.block_readers import BlockReader
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource

NAMES = ("w1", "w3", "w2")
"""Of gate, up and down."""


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)
    sandwich = architecture.sandwich_norms

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, (Dense, Experts))
        inside = f"{name}.feed_forward"
        block: layers.Mixer
        if isinstance(mixer, Attention) and architecture.family == "lfm2":
            block = read.attention(mixer, f"{name}.self_attn", out="out_proj",
                                   norms=("q_layernorm", "k_layernorm"))
        else:
            block = read.mixer(mixer, {Attention: f"{name}.self_attn", ShortConv: f"{name}.conv"})
        return DecoderLayer(
            read.norm(f"{name}.operator_norm"), block, read.norm(f"{name}.ffn_norm"),
            (read.swiglu(feed, inside, NAMES) if isinstance(feed, Dense)
             else read.experts(feed, inside, names=NAMES, choice_bias="expert_bias")),
            mixer_out_norm=read.norm(f"{name}.post_operator_norm") if sandwich else None,
            feed_out_norm=read.norm(f"{name}.post_ffn_norm") if sandwich else None)

    return read.model(layer, final_norm="embedding_norm")
