"""Pieces that several families read from a checkpoint under the same names.

A family file says which block sits under which name; where two families agree on a name's meaning, the
reading of it is here once. All take a ``TensorSource`` and are run twice: against the check, then for real.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.families.architecture import Architecture, Attention, Dense, Experts
from weft.models.blocks.attention import AttentionBlock, separate_gate
from weft.models.blocks.dense import DenseBlock
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm, Projection, SwiGlu
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.rank_share import RankedModel
from weft.models.tensor_source import Part
from weft.models.weights import TensorSource
from weft.tensor.ops.moe import ExpertWeights


def model(architecture: Architecture, source: TensorSource, layers: list[DecoderLayer], *,
          final_norm: str = "norm.weight", plus_one: bool = False,
          embedding: str = "embed_tokens.weight") -> CausalModel:
    """Embedding, final norm and head around ``layers``."""
    share, hidden = source.share, architecture.hidden_size
    vocab = architecture.vocab_size if share is None else share.vocabulary(architecture.vocab_size).count
    tied = architecture.tied_embeddings
    table = source.table(embedding, vocab, hidden, is_head=tied)
    head = source.head(vocab, hidden, tied=table if tied else None)
    norm = Norm(source.tensor(final_norm, hidden), architecture.norm_eps, plus_one)
    if share is not None:
        return RankedModel(architecture, share, embedding=table, layers=layers, final_norm=norm, head=head)
    return CausalModel(architecture, embedding=table, layers=layers, final_norm=norm, head=head)


def attention(architecture: Architecture, source: TensorSource, shape: Attention, name: str, *,
              out: str = "o_proj", norms: tuple[str, str] = ("q_norm", "k_norm"),
              plus_one: bool = False) -> AttentionBlock:
    """``name``.{q,k,v}_proj fused into one projection, with the gate's rows moved behind the query's and head
    gates (``g_proj``, ``gate_proj`` on the hub) at the end."""
    hidden, eps = architecture.hidden_size, architecture.norm_eps
    q_width = shape.heads * shape.head_dim
    q_rows = q_width * 2 if shape.gated else q_width
    kv_rows = shape.kv_heads * shape.head_dim
    widths = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    projections: list[Part] = [(f"{name}.{part}.weight", rows) for part, rows in widths]
    if shape.gated:
        projections[0] = (*projections[0][:2], lambda rows: separate_gate(rows, shape.heads, shape.head_dim))
    if shape.head_gated:
        part = "gate_proj" if source.has(f"{name}.gate_proj.weight") else "g_proj"
        projections.append((f"{name}.{part}.weight", shape.heads))
    bias = source.rows([(f"{name}.{part}.bias", rows) for part, rows in widths]) if shape.bias else None
    if bias is not None and shape.head_gated:
        bias = torch.nn.functional.pad(bias, (0, shape.heads))
    if shape.gated and bias is not None:
        bias[:q_rows] = separate_gate(bias[:q_rows], shape.heads, shape.head_dim)
    out_bias = source.tensor(f"{name}.{out}.bias", hidden) if shape.bias else None
    q_norm = k_norm = None
    if shape.qk_norm:
        widths_of_norms = (q_width, kv_rows) if shape.norm_whole else (shape.head_dim, shape.head_dim)
        q_norm, k_norm = (Norm(source.tensor(f"{name}.{norm}.weight", width), eps, plus_one)
                          for norm, width in zip(norms, widths_of_norms, strict=True))
    qkv: Projection = source.linear(projections, hidden, bias)
    if source.share is not None and shape.norm_whole and q_norm is not None and k_norm is not None:
        qkv = source.share.normed_heads(qkv, shape, q_norm, k_norm)
        shape, q_norm, k_norm = replace(shape, qk_norm=False, norm_whole=False), None, None
    return AttentionBlock(shape, qkv, source.linear([(f"{name}.{out}.weight", hidden)], q_width, out_bias),
                          q_norm, k_norm)


def swiglu(source: TensorSource, name: str, hidden: int, width: int, *,
           names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> SwiGlu:
    """``name``.{gate,up}_proj fused, and down_proj."""
    gate, up, down = names
    gate_up = source.linear([(f"{name}.{gate}.weight", width), (f"{name}.{up}.weight", width)], hidden)
    return SwiGlu(gate_up, source.linear([(f"{name}.{down}.weight", hidden)], width))


def dense(source: TensorSource, name: str, hidden: int, shape: Dense) -> DenseBlock:
    """``name``.{gate,up,down}_proj in any of the forms that ``Dense`` tells of."""
    inner = [f"{name}.gate_proj", f"{name}.up_proj"] if shape.gated else [f"{name}.up_proj"]

    def rows(kind: str) -> list[tuple[str, int]]:
        return [(f"{part}.{kind}", shape.width) for part in inner]

    down_bias = source.tensor(f"{name}.down_proj.bias", hidden) if shape.bias else None
    return DenseBlock(
        shape, source.linear(rows("weight"), hidden, source.rows(rows("bias")) if shape.bias else None),
        source.linear([(f"{name}.down_proj.weight", hidden)], shape.width, down_bias))


def qkv_conv(source: TensorSource, name: str, widths: tuple[int, int, int], kernel: int) -> torch.Tensor:
    """[channels of q, k and v, kernel]: one tensor (``name``.conv1d) or three (``name``.q_conv1d ...).

    Transformers saves three by cutting its one into equal parts, whatever the widths are; put together again
    they are the same, so what counts is the sum. A rank reads all three and keeps its channels."""
    if source.has(f"{name}.conv1d.weight"):
        return source.tensor(f"{name}.conv1d.weight", sum(widths), 1, kernel).squeeze(1)
    names = [f"{name}.{part}_conv1d.weight" for part in "qkv"]
    stored = [source.stored_rows(part) for part in names]
    place = None if source.share is None else source.share.place
    whole = widths if place is None else tuple(width * place.size for width in widths)
    counts = stored if sum(stored) == sum(whole) else whole
    conv = source.rows(list(zip(names, counts, strict=True)), 1, kernel).squeeze(1)
    if place is None:
        return conv
    return torch.cat([part.chunk(place.size)[place.rank] for part in torch.split(conv, list(whole))])


def gated_experts(source: TensorSource, name: str, hidden: int, shape: Experts, *,
                  names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
                  ) -> tuple[ExpertWeights, ExpertWeights]:
    """gate_up and down of all experts. Hub releases store each expert by itself
    (``name``.3.gate_proj.weight); transformers may save them as two tensors of all experts
    (``name``.gate_up_proj). Both are read."""
    gate, up, down = names
    own, width = source.own_experts(shape.count), shape.width
    if source.has(f"{name}.gate_up_proj"):
        return (source.all_experts(f"{name}.gate_up_proj", len(own), 2 * width, hidden),
                source.all_experts(f"{name}.down_proj", len(own), hidden, width))
    each = [f"{name}.{expert}" for expert in own]
    gate_up = source.experts([(f"{e}.{gate}.weight", f"{e}.{up}.weight") for e in each], width, hidden)
    return gate_up, source.experts([(f"{e}.{down}.weight",) for e in each], hidden, width)


def qwen_experts(source: TensorSource, name: str, hidden: int, shape: Experts) -> ExpertsBlock:
    """Router, experts and gated shared expert of Qwen's sparse block."""
    gate_up, down = gated_experts(source, f"{name}.experts", hidden, shape)
    return ExpertsBlock(
        shape, Linear(source.tensor(f"{name}.gate.weight", shape.count, hidden)), gate_up, down,
        shared=swiglu(source, f"{name}.shared_expert", hidden, shape.shared_width),
        shared_gate=Linear(source.tensor(f"{name}.shared_expert_gate.weight", 1, hidden)))
