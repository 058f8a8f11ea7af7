"""Kimi Linear: three layers of Kimi delta attention to one of latent attention, and experts.

Ling 3 (``bailing_hybrid``) is put together in the same way.

Names differ between hub releases and what transformers saves; both are read. Sources: transformers
``kimi_linear`` and ``bailing_hybrid``.
"""

from __future__ import annotations

from functools import partial

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
from weft.families.tensors import GATED
from weft.models.block_readers import BlockReader, Order
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
    embedding = "word_embeddings" if source.has("word_embeddings.weight") else "embed_tokens"

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        inside = f"{name}.attention" if source.has(f"{name}.attention.q_proj.weight") else f"{name}.self_attn"
        if isinstance(mixer, KimiDelta):
            block: KimiDeltaBlock | LatentAttentionBlock = _delta(read, mixer, inside)
        else:
            assert isinstance(mixer, LatentAttention)
            block = _latent(read, mixer, inside)
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"), block, read.norm(f"{name}.post_attention_layernorm"),
            _feed_forward(read, feed, name))

    return read.model(layer, embedding=embedding)


def _delta(reader: BlockReader, shape: KimiDelta, name: str) -> KimiDeltaBlock:
    forget = "forget_gate." if reader.source.has(f"{name}.forget_gate.A_log") else ""
    read = reader.table(tensors.kimi_delta(shape, reader.hidden, forget=forget, out=_out(reader, name)), name)
    return KimiDeltaBlock(
        shape, read.linear("project"), conv=read.qkv_conv(), decay=read.decay().flatten(),
        dt_bias=read.tensor("dt_bias"), forget=None if shape.wide_gates else read.linear("forget"),
        gate=None if shape.wide_gates else read.linear("gate"),
        norm=read.tensor("norm"), norm_eps=reader.eps, out=read.linear("out"))


def _latent(reader: BlockReader, shape: LatentAttention, name: str) -> LatentAttentionBlock:
    read = reader.table(tensors.latent_attention(shape, reader.hidden, out=_out(reader, name)), name)
    expansion = read.tensor("expansion").view(shape.heads, -1, shape.latent_dim)
    keys, values = torch.split(expansion, [shape.own_dim, shape.value_dim], dim=1)
    latent_norm = read.norm("latent_norm", NORM_EPS)
    assert latent_norm is not None
    bias = read.get("latent.bias")
    orders: dict[str, Order] = {}
    if shape.rope is not None:
        # DeepSeek pairs neighbours. Queries and keys move alike, so their products stay.
        queries = partial(_halves, heads=shape.heads, own=shape.own_dim)
        orders = {"q_proj.weight": queries, "q_b_proj.weight": queries,
                  "kv_a_proj_with_mqa.weight": partial(_halves, heads=1, own=shape.latent_dim)}
        if bias is not None:
            before = (shape.query_rank or 0) + shape.latent_dim
            bias = _halves(bias[:, None], heads=1, own=before)[:, 0]
    if bias is not None and shape.head_gated:
        bias = torch.nn.functional.pad(bias, (0, shape.heads))
    return LatentAttentionBlock(
        shape, query=read.linear("query", orders=orders),
        latent=read.linear("latent", orders=orders, bias=bias), latent_norm=latent_norm,
        keys_HOC=keys.contiguous(), values_HVC=values.contiguous(), out=read.linear("out"),
        query_norm=read.norm("query_norm", NORM_EPS))


def _halves(rows: torch.Tensor, *, heads: int, own: int) -> torch.Tensor:
    """[heads x rows, columns]: in each head, behind the first ``own`` rows, those of even number first."""
    by_head = rows.view(heads, -1, rows.shape[-1])
    return torch.cat((by_head[:, :own], by_head[:, own::2], by_head[:, own + 1::2]), dim=1).flatten(0, 1)


def _out(reader: BlockReader, name: str) -> str:
    return "dense" if reader.source.has(f"{name}.dense.weight") else "o_proj"


def _feed_forward(read: BlockReader, shape: FeedForward | None, name: str) -> SwiGlu | ExpertsBlock:
    saved = f"{name}.block_sparse_moe"
    if isinstance(shape, Dense):   # transformers' save takes dense layers for sparse ones
        return read.swiglu(shape, saved if read.source.has(f"{saved}.gate_proj.weight") else f"{name}.mlp")
    assert isinstance(shape, Experts)
    inside = saved if read.source.has(f"{saved}.gate.weight") else f"{name}.mlp"
    own_names = read.source.has(f"{inside}.experts.0.w1.weight")
    bias = "expert_bias" if read.source.has(f"{inside}.gate.expert_bias") else "e_score_correction_bias"
    return read.experts(shape, inside, names=("w1", "w3", "w2") if own_names else GATED,
                        choice_bias=f"gate.{bias}", router_dtype=torch.float32, shared="shared_experts")
