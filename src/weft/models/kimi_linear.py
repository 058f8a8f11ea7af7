"""Kimi Linear: three layers of Kimi delta attention to one of latent attention, and experts.

Names differ between hub releases and what transformers saves; both are read. Source: transformers
``kimi_linear``.
"""

from __future__ import annotations

import torch

from weft.families import tensors
from weft.families.architecture import (
    Architecture,
    Dense,
    Experts,
    FeedForward,
    KimiDelta,
    LatentAttention,
    Mixer,
)
from weft.models.block_readers import BlockReader
from weft.models.blocks.attention import LatentAttentionBlock
from weft.models.blocks.feed_forward import ExpertsBlock, SwiGlu
from weft.models.blocks.recurrent import KimiDeltaBlock
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource

NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever config.json says for the others."""


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        inside = f"{name}.self_attn"
        if isinstance(mixer, KimiDelta):
            block: KimiDeltaBlock | LatentAttentionBlock = _delta(read, mixer, inside)
        else:
            assert isinstance(mixer, LatentAttention)
            block = _latent(read, mixer, inside)
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"), block, read.norm(f"{name}.post_attention_layernorm"),
            _feed_forward(read, feed, name))

    return read.model(layer)


def _delta(reader: BlockReader, shape: KimiDelta, name: str) -> KimiDeltaBlock:
    forget = "forget_gate." if reader.source.has(f"{name}.forget_gate.A_log") else ""
    read = reader.table(tensors.kimi_delta(shape, reader.hidden, forget=forget), name)
    return KimiDeltaBlock(
        shape, read.linear("project"), conv=read.qkv_conv(), decay=read.decay().flatten(),
        dt_bias=read.tensor("dt_bias"), forget=read.linear("forget"), gate=read.linear("gate"),
        norm=read.tensor("norm"), norm_eps=reader.eps, out=read.linear("out"))


def _latent(reader: BlockReader, shape: LatentAttention, name: str) -> LatentAttentionBlock:
    read = reader.table(tensors.latent_attention(shape, reader.hidden), name)
    expansion = read.tensor("expansion").view(shape.heads, -1, shape.latent_dim)
    keys, values = torch.split(expansion, [shape.own_dim, shape.value_dim], dim=1)
    latent_norm = read.norm("latent_norm", NORM_EPS)
    assert latent_norm is not None
    return LatentAttentionBlock(
        shape, query=read.linear("query"), latent=read.linear("latent"), latent_norm=latent_norm,
        keys_HOC=keys.contiguous(), values_HVC=values.contiguous(), out=read.linear("out"),
        query_norm=read.norm("query_norm", NORM_EPS))


def _feed_forward(read: BlockReader, shape: FeedForward | None, name: str) -> SwiGlu | ExpertsBlock:
    saved = f"{name}.block_sparse_moe"
    if isinstance(shape, Dense):   # transformers' save takes dense layers for sparse ones
        return read.swiglu(shape, saved if read.source.has(f"{saved}.gate_proj.weight") else f"{name}.mlp")
    assert isinstance(shape, Experts)
    return read.experts(shape, saved if read.source.has(f"{saved}.gate.weight") else f"{name}.mlp",
                        names=("w1", "w3", "w2"), router_dtype=torch.float32, shared="shared_experts")
