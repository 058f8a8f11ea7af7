"""OLMo 3 and OLMo hybrid: norms on what comes out of an attention layer, and on all heads of q and k at once.

A delta layer of the hybrid is an ordinary pre-norm layer. Transformers' save renames norms of attention
layers on the way; both names are read. Sources: transformers ``olmo3`` and ``olmo_hybrid``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Attention, Dense, FeedForward, GatedDelta, Mixer
from weft.models.block_readers import BlockReader
from weft.models.blocks.linear import Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource

DELTA_NORM_EPS = 1e-5
"""Of the gated norm in a delta layer, whatever config.json says for the others."""


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def norm(name: str, saved: str, on_the_hub: str = "") -> Norm:
        return read.norm(f"{name}.{on_the_hub if source.has(f'{name}.{on_the_hub}.weight') else saved}")

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, Dense)
        feed_forward = read.swiglu(feed, f"{name}.mlp")
        after = norm(name, "post_attention_layernorm", "feedforward_layer_norm")
        if isinstance(mixer, GatedDelta):
            delta = read.gated_delta(mixer, f"{name}.linear_attn", names="each", norm="o_norm", out="o_proj",
                                     eps=DELTA_NORM_EPS)
            return DecoderLayer(norm(name, "input_layernorm", "attention_layer_norm"), delta, after,
                                feed_forward)
        return DecoderLayer(None, read.mixer(mixer, {Attention: f"{name}.self_attn"}), None, feed_forward,
                            mixer_out_norm=after, feed_out_norm=norm(name, "post_feedforward_layernorm"))

    return read.model(layer)
