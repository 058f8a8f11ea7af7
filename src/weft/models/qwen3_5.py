"""Qwen3.5 and Qwen3-Next, dense and sparse: gated delta net with every fourth layer gated attention.

Qwen3.5 stores four tensors for the projection of a delta layer, Qwen3-Next two whose rows are grouped by key
head. These are put in the order of Qwen3.5 once, at load. Norm weights are stored as the distance from 1,
except the gated norm of the delta layers. Sources: transformers ``qwen3_5``, ``qwen3_5_moe``, ``qwen3_next``.
"""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDelta,
    Mixer,
)
from weft.models import layer as layers
from weft.models.block_readers import BlockReader
from weft.models.blocks.feed_forward import ExpertsBlock, SwiGlu
from weft.models.blocks.recurrent import GatedDeltaBlock, ungroup_ba, ungroup_qkvz
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source, plus_one=True)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        inside = f"{name}.linear_attn"
        if isinstance(mixer, GatedDelta) and architecture.family == "qwen3_next":
            block: layers.Mixer = _grouped(read, mixer, inside)
        else:
            block = read.mixer(mixer, {Attention: f"{name}.self_attn", GatedDelta: inside})
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"), block, read.norm(f"{name}.post_attention_layernorm"),
            feed_forward(read, feed, f"{name}.mlp"))

    return read.model(layer)


def feed_forward(read: BlockReader, shape: FeedForward | None, name: str) -> SwiGlu | ExpertsBlock:
    """Also that of the head for multi-token prediction (``weft.models.mtp``)."""
    if isinstance(shape, Dense):
        return read.swiglu(shape, name)
    assert isinstance(shape, Experts)
    return read.experts(shape, name, shared="shared_expert")


def _grouped(read: BlockReader, shape: GatedDelta, name: str) -> GatedDeltaBlock:
    return read.gated_delta(shape, name, names="by_key_head", orders={
        "in_proj_qkvz.weight": lambda rows: ungroup_qkvz(rows, shape),
        "in_proj_ba.weight": lambda rows: ungroup_ba(rows, shape)})
