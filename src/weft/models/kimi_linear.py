"""Kimi Linear: three layers of Kimi delta attention to one of latent attention, and experts.

Names differ between hub releases and what transformers saves: the forget gate's tensors lie in the layer or
in ``forget_gate``; its convolutions are three tensors or one; experts are
``block_sparse_moe.experts.3.w1`` or stacked under ``mlp.experts``. Both are read. Source: transformers
``kimi_linear``.
"""

from __future__ import annotations

import torch

from weft.families.architecture import Architecture, Dense, Experts, FeedForward, KimiDelta, LatentAttention
from weft.models import block_readers as parts
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.kimi_delta import KimiDeltaBlock
from weft.models.blocks.latent_attention import LatentAttentionBlock
from weft.models.blocks.linear import Linear, Norm, SwiGlu
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer, Mixer
from weft.models.tensor_source import decay_of
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers)


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape = architecture.mixers[index]
    mixer: Mixer
    if isinstance(shape, KimiDelta):
        mixer = _delta(source, shape, f"{name}.self_attn", hidden, eps)
    else:
        assert isinstance(shape, LatentAttention)
        mixer = _latent(source, shape, f"{name}.self_attn", hidden)
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.post_attention_layernorm.weight", hidden), eps),
        feed_forward=_feed_forward(source, architecture.feed_forwards[index], name, hidden))


def _delta(source: TensorSource, shape: KimiDelta, name: str, hidden: int, eps: float) -> KimiDeltaBlock:
    width, heads, rank = shape.width, shape.heads, shape.head_dim
    forget = f"{name}.forget_gate" if source.has(f"{name}.forget_gate.A_log") else name
    rows = [(f"{name}.q_proj.weight", width), (f"{name}.k_proj.weight", width),
            (f"{name}.v_proj.weight", width), (f"{name}.b_proj.weight", heads),
            (f"{forget}.f_a_proj.weight", rank), (f"{name}.g_a_proj.weight", rank)]
    return KimiDeltaBlock(
        shape, source.linear(rows, hidden),
        conv=parts.qkv_conv(source, name, (width, width, width), shape.conv_kernel),
        decay=decay_of(source.tensor(f"{forget}.A_log", 1, 1, heads, 1, dtype=torch.float32)).flatten(),
        dt_bias=source.tensor(f"{forget}.dt_bias", width, dtype=torch.float32),
        forget=source.linear([(f"{forget}.f_b_proj.weight", width)], rank),
        gate=source.linear([(f"{name}.g_b_proj.weight", width)], rank),
        norm=source.tensor(f"{name}.o_norm.weight", rank), norm_eps=eps,
        out=source.linear([(f"{name}.o_proj.weight", hidden)], width))


NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever config.json says for the others."""


def _latent(source: TensorSource, shape: LatentAttention, name: str, hidden: int) -> LatentAttentionBlock:
    heads, latent, rank = shape.heads, shape.latent_dim, shape.query_rank
    into = [("kv_a_proj_with_mqa", latent + shape.shared_dim)]
    if rank is not None:
        into = [("q_a_proj", rank), *into]
    bias = None
    if shape.bias:
        bias = source.rows([(f"{name}.{part}.bias", rows) for part, rows in into])
    query = source.linear([(f"{name}.{'q_proj' if rank is None else 'q_b_proj'}.weight",
                            heads * shape.key_dim)], hidden if rank is None else rank)
    expansion = source.tensor(f"{name}.kv_b_proj.weight", heads * (shape.own_dim + shape.value_dim), latent)
    keys, values = torch.split(expansion.view(heads, -1, latent), [shape.own_dim, shape.value_dim], dim=1)
    query_norm = None
    if rank is not None:
        query_norm = Norm(source.tensor(f"{name}.q_a_layernorm.weight", rank), NORM_EPS)
    return LatentAttentionBlock(
        shape, query=query,
        latent=source.linear([(f"{name}.{part}.weight", rows) for part, rows in into], hidden, bias),
        latent_norm=Norm(source.tensor(f"{name}.kv_a_layernorm.weight", latent), NORM_EPS),
        keys_HOC=keys.contiguous(), values_HVC=values.contiguous(),
        out=source.linear([(f"{name}.o_proj.weight", hidden)], heads * shape.value_dim,
                          source.tensor(f"{name}.o_proj.bias", hidden) if shape.bias else None),
        query_norm=query_norm)


def _feed_forward(source: TensorSource, shape: FeedForward | None, name: str,
                  hidden: int) -> SwiGlu | ExpertsBlock:
    if isinstance(shape, Dense):   # transformers' save takes dense layers for sparse ones
        saved = f"{name}.block_sparse_moe"
        name = saved if source.has(f"{saved}.gate_proj.weight") else f"{name}.mlp"
        return parts.swiglu(source, name, hidden, shape.width)
    assert isinstance(shape, Experts)
    name = f"{name}.block_sparse_moe" if source.has(f"{name}.block_sparse_moe.gate.weight") else f"{name}.mlp"
    gate_up, down = parts.gated_experts(source, f"{name}.experts", hidden, shape, names=("w1", "w3", "w2"))
    router = source.tensor(f"{name}.gate.weight", shape.count, hidden, dtype=torch.float32)
    return ExpertsBlock(
        shape, Linear(router), gate_up, down,
        shared=parts.swiglu(source, f"{name}.shared_experts", hidden, shape.shared_width),
        choice_bias=source.tensor(f"{name}.gate.e_score_correction_bias", shape.count, dtype=torch.float32))
