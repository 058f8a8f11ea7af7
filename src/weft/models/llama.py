"""Attention in every layer, SwiGLU or experts: Llama, Mistral, Qwen3 and Qwen3-MoE.

Sources: transformers ``llama``, ``mistral``, ``qwen3``, ``qwen3_moe``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Attention, Dense, Experts, FeedForward, Mixer
from weft.models.block_readers import BlockReader
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, (Dense, Experts))
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"), read.mixer(mixer, {Attention: f"{name}.self_attn"}),
            read.norm(f"{name}.post_attention_layernorm"),
            (read.swiglu(feed, f"{name}.mlp") if isinstance(feed, Dense)
             else read.experts(feed, f"{name}.mlp")))

    return read.model(layer)
