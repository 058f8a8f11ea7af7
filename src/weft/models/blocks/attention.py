"""Softmax attention: one projection, norms, rotary, write, read, output gate.

    x_TD --qkv--> [ q | (gate) | k | v | (head gates) ]        rows of one matrix, in this order
                    |             |   |
                 norm,rotary   norm,rotary
                    |             |   +--- write_kv into the pages of this step's tokens
                    +--- paged_attention over all pages of each run ---> o * sigmoid(gate) --out--> y_TD

A layer whose window is kept as a ring has no pages: one op writes the ring in the state slot and reads it.

Sources: transformers ``Qwen3NextAttention`` and ``Lfm3Attention`` for the gates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F

from weft.families.mixers.attention import Attention, Index, KeyIndex, alibi_slopes
from weft.models.block_reader import BlockReader
from weft.models.blocks.chosen import IndexBlock, read_index
from weft.models.blocks.linear import Linear, Norm, Projection, fused_block_of, neighbours_apart
from weft.models.table_reader import TableReader
from weft.models.weights import Order
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import (
    AttentionCore,
    CosSin,
    attention_layer,
    choosing_layer,
    seen_layer,
    staged,
    write_projected,
)
from weft.tensor.ops.chosen_blocks import Seen

__all__ = ["AttentionBlock", "CosSin", "separate_gate"]


@dataclass(slots=True)
class AttentionBlock:
    """One attention layer. ``qkv``: rows q [heads * D], gate [heads * D] when ``shape.gated``, k, v [kv_heads * D
    each], head gates [heads] when ``shape.head_gated``; no v or no k and v if the shape says so. Norms are over D, or
    over all heads when ``shape.norm_whole``; with ``shape.norm_by_head`` their weights are those of all heads.
    """

    shape: Attention
    qkv: Projection
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: torch.Tensor | None = None
    """float32 [heads], if ``shape.sinks``."""
    v_norm: torch.Tensor | None = None
    """Ones [D], if ``shape.values_normed``."""
    index: IndexBlock | None = None
    """Index of chosen blocks, if ``shape.index`` has tensors."""
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    """Bank and slopes of the bias, if ``shape.alibi``."""

    core: AttentionCore = field(init=False)
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        q_norm, k_norm = self.q_norm, self.k_norm
        self.core = AttentionCore(
            self.shape,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            q_norm is not None and q_norm.plus_one,
            self.sinks,
            self.v_norm,
            _biases(q_norm, k_norm),
            *(self.bias or (None, None)),
        )
        plain = self.shape.index is None and not self.shape.value_dim
        self.fused = fused_block_of(self.qkv, self.out) if plain else None

    @property
    def last_product(self) -> Projection:
        """The product whose result is the block's output."""
        return self.out

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        projected_TW = self._projected(x_TD)
        if isinstance(self.shape.index, KeyIndex):
            return self.out(inputs.asked_of(choosing_layer(projected_TW, self.core, inputs, cache, cos_sin)))
        seen = chosen(self.index, x_TD, None, inputs, cache, cos_sin)
        o_TC = (
            attention_layer(projected_TW, self.core, inputs, cache, cos_sin)
            if seen is None
            else seen_layer(projected_TW, self.core, inputs, cache, cos_sin, seen)
        )
        if self.shape.value_dim:
            o_TC = torch.unflatten(o_TC, 1, (-1, self.shape.head_dim))[..., : self.shape.value_dim].flatten(1)
        return self.out(inputs.asked_of(o_TC))

    def _projected(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values; narrower values as wide as keys, with zeros at the end."""
        projected_TW, shape = self.qkv(x_TD), self.shape
        if not shape.value_dim:
            return projected_TW
        v_THD = torch.unflatten(projected_TW[:, -shape.kv_heads * shape.value_dim :], 1, (-1, shape.value_dim))
        v_THD = F.pad(v_THD * shape.value_factor, (0, shape.head_dim - shape.value_dim))
        return torch.cat((projected_TW[:, : -shape.kv_heads * shape.value_dim], v_THD.flatten(1)), dim=1)

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> None:
        """Write the keys and values of the tokens, without an output."""
        if self.index is not None and cache.index is not None:
            self.index.write(x_TD, inputs, cache.index, cos_sin)
        write_projected(self._projected(x_TD), self.core, inputs, cache, cos_sin)

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """Return the block as a part of a stack; ``x_TD`` is its input."""
        return None if self.fused is None else staged(self.fused, x_TD, self.core, cache)


def chosen(
    index: IndexBlock | None,
    x_TD: torch.Tensor,
    bottleneck_TR: torch.Tensor | None,
    inputs: StepInputs,
    cache: LayerCache,
    cos_sin: CosSin | None,
    *,
    reused: bool = False,
) -> Seen | None:
    """Return the tokens that each token sees by ``index``; None for all before it. ``reused``: those of the last layer
    with an index.
    """
    if reused:
        before: Seen | None = inputs.runs.memo[_CHOICE]
        return before
    if index is None:
        return None
    assert cache.index is not None, "an index without pages"
    seen = inputs.runs.memo[_CHOICE] = index(x_TD, bottleneck_TR, inputs, cache.index, cos_sin)
    return seen


_CHOICE = "choice"


def _biases(q_norm: Norm | None, k_norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    q_bias, k_bias = (None if norm is None else norm.bias for norm in (q_norm, k_norm))
    return None if q_bias is None or k_bias is None else (q_bias, k_bias)


def separate_gate(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """Return all query rows, then all gate rows, of a gated query projection that is stored head by head as [query |
    gate]. ``weight``: [heads * 2 * head_dim, ...] -> the same shape.
    """
    split = weight.reshape(heads, 2, head_dim, *weight.shape[1:])
    return split.transpose(0, 1).reshape(weight.shape)


def halves_swapped(rows: torch.Tensor, *, head_dim: int) -> torch.Tensor:
    """Return ``rows`` [heads x head_dim, ...] with the halves of each head swapped. So they turn the other way."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).flip(1).flatten(0, 2)


def kinds_apart(rows: torch.Tensor, *, shape: Attention) -> torch.Tensor:
    """Return all rows of queries, then those of keys, then those of values, of one tensor [rows, ...] in which those
    of some heads follow each other (``shape.grouped``, ``shape.parts``).
    """
    own = shape.heads // (shape.parts or shape.kv_heads)
    heads, kinds = ([own, own, own], (0, 2, 1)) if shape.parts else ([own, 1, 1], (0, 1, 2))
    rows_GHD = rows.view(-1, sum(heads), shape.head_dim, *rows.shape[1:])
    each = torch.split(rows_GHD, heads, dim=1)
    return torch.cat([each[kind].flatten(0, 2) for kind in kinds])


def first_ordered(rows: torch.Tensor, *, order: Order, count: int) -> torch.Tensor:
    """Return ``rows`` with the first ``count`` in ``order``."""
    return torch.cat((order(rows[:count]), rows[count:]))


def read_attention(
    read: BlockReader,
    shape: Attention,
    name: str,
    *,
    out: str = "o_proj",
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    gate: str | None = None,
    joined: str = "",
    paired: bool = False,
    backwards: bool = False,
) -> AttentionBlock:
    """Return one projection, with the gate's rows moved after the query's (``gate``: they are stored by
    themselves), and head gates (``g_proj``, ``gate_proj`` on the hub) at the end. ``joined``: the tensor that has the
    rows of all three, if the files have it. ``paired``: positions turn pairs of
    neighbours; ``backwards``: the other way."""
    source = read.source
    if shape.kv_of is not None:  # releases of Gemma 4 have keys and values of such layers; nothing uses them
        for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
            source.leave_all(f"{name}.{part}.")
    gates = "gate_proj" if source.has(f"{name}.gate_proj.weight") else "g_proj"
    joined = joined if source.has(f"{name}.{joined}.weight") else ""
    stored = shape.table(read.hidden, out=out, norms=norms, gates=gates, gate=gate, joined=joined)
    table = read.table(stored, name)
    bias = table.get("qkv.bias")
    if bias is not None and shape.head_gated:
        bias = torch.nn.functional.pad(bias, (0, shape.heads))
    orders: dict[str, Order] = {}
    if shape.gated and gate is None:
        orders["q_proj.weight"] = lambda rows: separate_gate(rows, shape.heads, shape.head_dim)
        if bias is not None:
            query_rows = 2 * shape.heads * shape.head_dim
            bias[:query_rows] = separate_gate(bias[:query_rows], shape.heads, shape.head_dim)
    if joined and shape.joined_rows is not None:
        orders[f"{joined}.weight"] = partial(kinds_apart, shape=shape)
        bias = None if bias is None else kinds_apart(bias, shape=shape)
    if (paired or backwards) and shape.rope is not None:
        order: Order = partial(halves_swapped, head_dim=shape.head_dim)
        if paired:
            order = partial(neighbours_apart, head_dim=shape.head_dim, turned=shape.rope.rotary_dim)
        orders |= {"q_proj.weight": order, "k_proj.weight": order}
        both = partial(first_ordered, order=order, count=(shape.heads + shape.kv_heads) * shape.head_dim)
        if joined:
            place = orders.get(f"{joined}.weight", torch.clone)
            orders[f"{joined}.weight"] = lambda rows: both(place(rows))
        bias = None if bias is None else both(bias)
    for mask in ("bias", "causal_mask", "masked_bias"):  # masks in files of old versions
        source.leave(f"{name}.{mask}")
    qkv: Projection = table.linear("qkv", orders=orders, bias=bias)
    q_norm, k_norm = _norms(read, table, shape, orders.get("k_proj.weight", torch.clone))
    if source.share is not None and shape.norm_whole and q_norm is not None and k_norm is not None:
        qkv = source.share.normed_heads(qkv, shape, q_norm, k_norm)
        shape, q_norm, k_norm = replace(shape, qk_norm=False, norm_whole=False), None, None
    return AttentionBlock(
        shape,
        qkv,
        table.linear("out"),
        q_norm,
        k_norm,
        table.get("sinks"),
        _v_norm(read, shape),
        _index(read, shape, name),
        _bias(read, shape),
    )


def _norms(read: BlockReader, table: TableReader, shape: Attention, order: Order) -> tuple[Norm | None, Norm | None]:
    """Return the norms of queries and keys. ``order``: of the rows of keys, which the weights of all heads take."""
    if shape.norm_plain:
        plain = Norm(read.ones(shape.head_dim), read.eps)
        return plain, plain
    norms = list(table.qk_norms(read.eps, plus_one=read.plus_one))
    for place, (role, norm) in enumerate(zip(("q_norm", "k_norm"), norms, strict=True)):
        if norm is None:
            continue
        if shape.norm_centred:
            norm = replace(norm, centred=True, bias=table.get(f"{role}.bias"))
        norms[place] = replace(norm, weight=order(norm.weight.flatten())) if shape.norm_by_head else norm
    return norms[0], norms[1]


def _index(read: BlockReader, shape: Attention, name: str) -> IndexBlock | None:
    if not isinstance(shape.index, Index):
        return None
    span = read.source.place.of_units(shape.kv_heads, copies=shape.kv_copies)
    return read_index(read, shape.index, name, shape.rope, own=slice(span.begin, span.begin + span.count))


def _bias(read: BlockReader, shape: Attention) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not shape.alibi:
        return None
    span, device = read.source.place.of_units(shape.heads), read.source.device
    slopes = alibi_slopes(span.total, shape.alibi)[span.begin : span.begin + span.count]
    bank_RE = -torch.arange(read.architecture.max_positions, dtype=torch.float32, device=device)[None]
    return bank_RE, torch.tensor(slopes, dtype=torch.float32, device=device)


def _v_norm(read: BlockReader, shape: Attention) -> torch.Tensor | None:
    if not shape.values_normed or shape.kv_of is not None:
        return None
    return torch.ones(shape.head_dim, dtype=read.source.dtype, device=read.source.device)
