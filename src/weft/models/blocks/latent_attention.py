"""Latent attention, absorbed: heads read the cached latents directly, without expanding keys and values.

    x_TD --query--> q = [ own | shared ] per head          x_TD --latent--> [ latent | shared key ]
                     |                                                   norm |
        q_own W_k^T  (into the latent's space)                              pages (all that is cached)
                     +--- latent_attention ---> o in the latent's space --W_v--> value per head --out--> y_TD

    q_own . (W_k c) = (W_k^T q_own) . c         sum_s p_s (W_v c_s) = W_v sum_s p_s c_s

Sources: DeepSeek-V2 (2024), section 2.1, without positions as ``KimiLinearAttention``, with them and head gates as
``BailingHybridAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from weft.families.mixers.latent_attention import LatentAttention
from weft.models.block_reader import BlockReader
from weft.models.blocks.adapted import AdaptedBlock, LatentChange
from weft.models.blocks.attention import chosen
from weft.models.blocks.chosen import IndexBlock, read_index
from weft.models.blocks.linear import Linear, Norm, Projection, by_head
from weft.models.table_reader import TableReader
from weft.models.weights import Order
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.chosen_blocks import attend_seen, within
from weft.tensor.ops.elementwise import each, rotary
from weft.tensor.ops.latent_attention import latent_attention, write_latents


@dataclass(slots=True)
class LatentAttentionBlock:
    """Latent attention. ``latent``: rows latent, shared key, gates (``shape.gate_width`` of a head); with a query
    bottleneck its rows come first, and ``query`` reads their norm, ``query_norm``. ``keys_HOC`` [heads, own, latent]
    and ``values_HVC`` [heads, value, latent] make a head's keys and values of a latent.
    """

    shape: LatentAttention
    query: Projection
    latent: Projection
    latent_norm: Norm
    keys_HOC: torch.Tensor
    values_HVC: torch.Tensor
    out: Linear
    query_norm: Norm | None = None
    index: IndexBlock | None = None
    """Index of chosen blocks, if ``shape.index``."""
    sinks: torch.Tensor | None = None
    """float32 [heads], if ``shape.sinks``."""
    shared_norm: Norm | None = None
    """Norm of the shared key, if ``shape.shared_normed``."""
    adapted: AdaptedBlock[LatentChange] | None = field(default=None, repr=False, compare=False)
    """Changes of ``keys_HOC`` and ``values_HVC`` by adapters."""

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        assert cache.k is not None, "a latent attention layer without pages"
        shape = self.shape
        bottleneck, latent_TC, shared_TS, gates_TG = self._projected(x_TD)
        asked_TR = x_TD if self.query_norm is None else self.query_norm(bottleneck)
        read_TR = torch.cat((asked_TR, bottleneck), dim=-1) if shape.query_gated else asked_TR
        own_THO, shared_THS, gate_THV = torch.split(
            by_head(self.query(read_TR), shape.heads),
            [shape.own_dim, shape.shared_dim, shape.value_dim * shape.query_gated],
            dim=-1,
        )
        if cos_sin is not None:
            shared_THS, turned_T1S = rotary(shared_THS, shared_TS[:, None], *cos_sin)
            shared_TS = turned_T1S[:, 0]
        q_THW = torch.cat((self._in_latents(own_THO), shared_THS), dim=-1)
        row_TW = torch.cat((self.latent_norm(latent_TC), shared_TS), dim=-1)
        scale = None if cache.head_scales is None else cache.head_scales[0, 0]
        if scale is not None:
            # Powers of two: the row is divided by its scale, and queries and outputs are multiplied, exactly.
            q_THW, row_TW = q_THW * scale, row_TW / scale
        seen = chosen(self.index, x_TD, asked_TR, inputs, cache, cos_sin, reused=shape.reuses_choice)
        if shape.window is not None:
            seen = within(shape.window, inputs.runs)
        if seen is None and self.sinks is not None:
            seen = [None] * inputs.runs.run_count
        if seen is None:
            o_THC = latent_attention(
                q_THW,
                row_TW,
                cache.k,
                inputs.positions_T,
                inputs.runs,
                shape.scale,
                shape.latent_dim,
                cache.token_scales,
            )
        else:
            write_latents(row_TW, cache.k, inputs.positions_T, inputs.runs, cache.token_scales)
            o_THC = attend_seen(q_THW, cache, inputs.runs, shape.scale, seen, shape.latent_dim, self.sinks)
        if scale is not None:
            o_THC = o_THC * scale
        o_THV = self._of_latents(inputs.asked_of(o_THC))
        if shape.gate_width:
            gate_THV = by_head(gates_TG, shape.heads)
        if shape.gate_width or shape.query_gated:
            # float32 until the one rounding, as in attention.
            gate_THW = each(torch.sigmoid, inputs.asked_of(gate_THV).float())
            o_THV = (o_THV.float() * gate_THW).to(x_TD.dtype)
        return self.out(o_THV.flatten(1))

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> None:
        """Write the latents of the tokens, without an output."""
        assert cache.k is not None, "a latent attention layer without pages"
        if self.index is not None and cache.index is not None:
            self.index.write(x_TD, inputs, cache.index, cos_sin)
        _, latent_TC, shared_TS, _ = self._projected(x_TD)
        if cos_sin is not None:
            shared_TS = rotary(shared_TS[:, None], shared_TS[:, None], *cos_sin)[1][:, 0]
        row_TW = torch.cat((self.latent_norm(latent_TC), shared_TS), dim=-1)
        if cache.head_scales is not None:
            row_TW = row_TW / cache.head_scales[0, 0]
        write_latents(row_TW, cache.k, inputs.positions_T, inputs.runs, cache.token_scales)

    def _projected(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the bottleneck of the queries, latents, shared keys, gates."""
        shape = self.shape
        bottleneck, latent_TC, shared_TS, gates_TG = torch.split(
            self.latent(x_TD),
            [shape.query_rank or 0, shape.latent_dim, shape.shared_dim, shape.heads * shape.gate_width],
            dim=-1,
        )
        if self.shared_norm is not None:
            shared_TS = self.shared_norm(shared_TS)
        return bottleneck, latent_TC, shared_TS, gates_TG

    def _in_latents(self, own_THO: torch.Tensor) -> torch.Tensor:
        """Return queries [T, heads, own] as [T, heads, latent]."""
        changes = [] if self.adapted is None else self.adapted.of_step(len(own_THO))
        plain_THO = own_THO
        if any(change.gain_HO is not None for _, change in changes):
            plain_THO = own_THO.clone()
            for group, change in changes:
                if change.gain_HO is not None:
                    plain_THO[group.rows] *= change.gain_HO
        q_THC = torch.einsum("tho,hoc->thc", plain_THO, self.keys_HOC)
        for group, change in changes:
            q_THC[group.rows] += change.query_change(own_THO[group.rows])
        return q_THC

    def _of_latents(self, o_THC: torch.Tensor) -> torch.Tensor:
        """Return outputs [T, heads, latent] as [T, heads, value]."""
        o_THV = torch.einsum("thc,hvc->thv", o_THC, self.values_HVC)
        for group, change in [] if self.adapted is None else self.adapted.of_step(len(o_THC)):
            if change.gain_HV is not None:
                o_THV[group.rows] *= change.gain_HV
            o_THV[group.rows] += change.output_change(o_THC[group.rows])
        return o_THV


def halves(rows: torch.Tensor, *, heads: int, own: int, turned: int) -> torch.Tensor:
    """Return ``rows`` [heads x rows, columns] with, among the ``turned`` rows of each head after the first ``own``,
    those of even number first.
    """
    rows_HRC, end = rows.view(heads, -1, rows.shape[-1]), own + turned
    parts = (rows_HRC[:, :own], rows_HRC[:, own:end:2], rows_HRC[:, own + 1 : end : 2], rows_HRC[:, end:])
    return torch.cat(parts, dim=1).flatten(0, 1)


def read_latent_attention(
    read: BlockReader, shape: LatentAttention, name: str, *, gate: str = ""
) -> LatentAttentionBlock:
    """Read latent attention. ``gate``: as its table takes it."""
    table = read.table(shape.table(read.hidden, out=read.out_name(name), gate=gate), name)
    keys, values = _expansion(read, shape, table)
    latent_norm = table.norm(
        "latent_norm",
        shape.norm_eps,
        plus_one=read.plus_one,
        gate=table.gate("latent_norm", shape.norm_gate, shape.latent_factor),
    )
    query_norm = (
        None
        if shape.query_rank is None
        else table.norm(
            "query_norm",
            shape.norm_eps,
            plus_one=read.plus_one,
            gate=table.gate("query_norm", shape.norm_gate, shape.query_factor),
        )
    )
    bias = table.get("latent.bias")
    orders: dict[str, Order] = {}
    if shape.rope is not None and shape.interleaved:
        # DeepSeek pairs neighbours. Queries and keys are permuted alike, so the scores stay the same.
        turned = shape.shared_dim
        queries = partial(halves, heads=shape.heads, own=shape.own_dim, turned=turned)
        orders = {
            "q_proj.weight": queries,
            "q_b_proj.weight": queries,
            "kv_a_proj_with_mqa.weight": partial(halves, heads=1, own=shape.latent_dim, turned=turned),
        }
        if bias is not None:
            before = (shape.query_rank or 0) + shape.latent_dim
            bias = halves(bias[:, None], heads=1, own=before, turned=turned)[:, 0]
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, shape.heads * shape.gate_width))
    block = LatentAttentionBlock(
        shape,
        query=table.linear("query", orders=orders),
        latent=table.linear("latent", orders=orders, bias=bias),
        latent_norm=latent_norm,
        keys_HOC=keys.contiguous(),
        values_HVC=values.contiguous(),
        out=table.linear("out"),
        query_norm=query_norm,
        index=None if shape.index is None else read_index(read, shape.index, name, shape.rope, shape.query_rank or 0),
        sinks=table.get("sinks"),
        shared_norm=_shared_norm(shape, table),
    )
    full, (rows, columns) = table.declared(table.table["expansion"][0])
    read.source.note(full, block, rows, columns, kind="expansion")
    return block


def _shared_norm(shape: LatentAttention, table: TableReader) -> Norm | None:
    if not shape.shared_normed:
        return None
    norm = table.norm("shared_norm", shape.norm_eps)
    if shape.interleaved:  # as the rows of the key are
        norm.weight = halves(norm.weight[:, None], heads=1, own=0, turned=shape.shared_dim)[:, 0].contiguous()
    return norm


def _expansion(read: BlockReader, shape: LatentAttention, table: TableReader) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [H, own, latent] and [H, value, latent], the matrices that make keys and values of latents."""
    if not read.source.has(f"{table.name}.k_b_proj.weight"):
        both = table.tensor("expansion").view(shape.heads, -1, shape.latent_dim)
        keys, values = torch.split(both, [shape.own_dim, shape.value_dim], dim=1)
        return keys, values
    # GGUF files, which ranks do not table: separate matrices, and the keys with their rows as columns.
    tensor, latent = read.source.tensor, shape.latent_dim
    keys = tensor(f"{table.name}.k_b_proj.weight", shape.heads, latent, shape.own_dim).transpose(1, 2)
    return keys, tensor(f"{table.name}.v_b_proj.weight", shape.heads, shape.value_dim, latent)
