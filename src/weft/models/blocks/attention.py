"""Softmax attention: one projection, norms, rotary, write, read, output gate; and its latent form.

    x_TD --qkv--> [ q | (gate) | k | v | (head gates) ]        rows of one matrix, in this order
                    |             |   |
                 norm,rotary   norm,rotary
                    |             |   +--- write_kv into the pages of this step's tokens
                    +--- paged_attention over all pages of each run ---> o * sigmoid(gate) --out--> y_TD

A layer whose window is kept as a ring has no pages: one op writes the ring in the state slot and reads it.

**Latent attention**, absorbed: heads meet the cached latents and make no keys or values of them.

    x_TD --query--> q = [ own | shared ] per head          x_TD --latent--> [ latent | shared key ]
                     |                                                   norm |
        q_own W_k^T  (into the latent's space)                              pages (all that is cached)
                     +--- latent_attention ---> o in the latent's space --W_v--> value per head --out--> y_TD

    q_own . (W_k c) = (W_k^T q_own) . c         sum_s p_s (W_v c_s) = W_v sum_s p_s c_s

Sources: transformers ``Qwen3NextAttention`` and ``Lfm3Attention`` for the gates; DeepSeek-V2 (2024), section
2.1, without positions as ``KimiLinearAttention``, with them and head gates as ``BailingHybridAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.architecture import Attention, KeyIndex, LatentAttention
from weft.models.blocks.adapted import AdaptedBlock, LatentChange
from weft.models.blocks.chosen import IndexBlock
from weft.models.blocks.linear import Linear, Norm, Projection, by_head, fused_block_of
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
from weft.tensor.ops.chosen_blocks import Seen, attend_seen
from weft.tensor.ops.elementwise import each, rotary
from weft.tensor.ops.latent_attention import latent_attention, write_latents

__all__ = ["AttentionBlock", "CosSin", "separate_gate"]


@dataclass(slots=True)
class AttentionBlock:
    """``qkv``: rows q [heads * D], gate [heads * D] when ``shape.gated``, k, v [kv_heads * D each], head
    gates [heads] when ``shape.head_gated``; no v or no k and v where the shape says so. Norms are over D, or
    over all heads when ``shape.norm_whole``."""

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
    """If ``shape.index`` has tensors."""

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
        )
        self.fused = fused_block_of(self.qkv, self.out) if self.shape.index is None else None

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        projected_TW = self.qkv(x_TD)
        if isinstance(self.shape.index, KeyIndex):
            return self.out(inputs.asked_of(choosing_layer(projected_TW, self.core, inputs, cache, cos_sin)))
        seen = chosen(self.index, x_TD, None, inputs, cache, cos_sin)
        o_TC = (
            attention_layer(projected_TW, self.core, inputs, cache, cos_sin)
            if seen is None
            else seen_layer(projected_TW, self.core, inputs, cache, cos_sin, seen)
        )
        return self.out(inputs.asked_of(o_TC))

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> None:
        """What the tokens keep, and no output."""
        if self.index is not None and cache.index is not None:
            self.index.write(x_TD, inputs, cache.index)
        write_projected(self.qkv(x_TD), self.core, inputs, cache, cos_sin)

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        return None if self.fused is None else staged(self.fused, x_TD, self.core, cache)


def chosen(
    index: IndexBlock | None,
    x_TD: torch.Tensor,
    bottleneck_TR: torch.Tensor | None,
    inputs: StepInputs,
    cache: LayerCache,
    cos_sin: CosSin | None,
) -> Seen | None:
    """What each token sees by ``index``; None for all before it."""
    if index is None:
        return None
    assert cache.index is not None, "an index without pages"
    return index(x_TD, bottleneck_TR, inputs, cache.index, cos_sin)


def separate_gate(weight: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """A gated query projection is stored head by head as [query | gate]; this returns all query rows, then
    all gate rows. ``weight``: [heads * 2 * head_dim, ...] -> the same shape."""
    split = weight.reshape(heads, 2, head_dim, *weight.shape[1:])
    return split.transpose(0, 1).reshape(weight.shape)


def halves(rows: torch.Tensor, *, heads: int, own: int) -> torch.Tensor:
    """[heads x rows, columns]: in each head, behind the first ``own`` rows, those of even number first."""
    rows_HRC = rows.view(heads, -1, rows.shape[-1])
    return torch.cat((rows_HRC[:, :own], rows_HRC[:, own::2], rows_HRC[:, own + 1 :: 2]), dim=1).flatten(0, 1)


@dataclass(slots=True)
class LatentAttentionBlock:
    """``latent``: rows latent, shared key, gates (``shape.gate_width`` of a head); with a query bottleneck in
    front of them the bottleneck's rows, and then ``query`` reads its norm, ``query_norm``. ``keys_HOC``
    [heads, own, latent] and ``values_HVC`` [heads, value, latent] make a head's keys and values of a
    latent."""

    shape: LatentAttention
    query: Projection
    latent: Projection
    latent_norm: Norm
    keys_HOC: torch.Tensor
    values_HVC: torch.Tensor
    out: Linear
    query_norm: Norm | None = None
    index: IndexBlock | None = None
    """If ``shape.index``."""
    adapted: AdaptedBlock[LatentChange] | None = field(default=None, repr=False, compare=False)
    """What adapters change of ``keys_HOC`` and ``values_HVC``."""

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        assert cache.k is not None, "a latent attention layer without pages"
        shape = self.shape
        bottleneck, latent_TC, shared_TS, gates_TG = self._projected(x_TD)
        asked_TR = x_TD if self.query_norm is None else self.query_norm(bottleneck)
        q_TC = self.query(asked_TR)
        q_THK = by_head(q_TC, shape.heads)
        own_THO, shared_THS = torch.split(q_THK, [shape.own_dim, shape.shared_dim], dim=-1)
        if cos_sin is not None:
            shared_THS, turned_T1S = rotary(shared_THS, shared_TS[:, None], *cos_sin)
            shared_TS = turned_T1S[:, 0]
        q_THW = torch.cat((self._in_latents(own_THO), shared_THS), dim=-1)
        row_TW = torch.cat((self.latent_norm(latent_TC), shared_TS), dim=-1)
        scale = None if cache.head_scales is None else cache.head_scales[0, 0]
        if scale is not None:
            # Powers of two: the row is divided by its scale, and queries and outputs are multiplied, exactly.
            q_THW, row_TW = q_THW * scale, row_TW / scale
        seen = chosen(self.index, x_TD, asked_TR, inputs, cache, cos_sin)
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
            o_THC = attend_seen(q_THW, cache, inputs.runs, shape.scale, seen, shape.latent_dim)
        if scale is not None:
            o_THC = o_THC * scale
        o_THV = self._of_latents(inputs.asked_of(o_THC))
        if shape.gate_width:
            # float32 until the one rounding, as in attention.
            gate_THW = each(torch.sigmoid, by_head(inputs.asked_of(gates_TG), shape.heads).float())
            o_THV = (o_THV.float() * gate_THW).to(x_TD.dtype)
        return self.out(o_THV.flatten(1))

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> None:
        """What the tokens keep, and no output."""
        assert cache.k is not None, "a latent attention layer without pages"
        if self.index is not None and cache.index is not None:
            self.index.write(x_TD, inputs, cache.index)
        _, latent_TC, shared_TS, _ = self._projected(x_TD)
        if cos_sin is not None:
            shared_TS = rotary(shared_TS[:, None], shared_TS[:, None], *cos_sin)[1][:, 0]
        row_TW = torch.cat((self.latent_norm(latent_TC), shared_TS), dim=-1)
        if cache.head_scales is not None:
            row_TW = row_TW / cache.head_scales[0, 0]
        write_latents(row_TW, cache.k, inputs.positions_T, inputs.runs, cache.token_scales)

    def _projected(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Bottleneck of the queries, latents, shared keys, gates."""
        shape = self.shape
        return torch.split(
            self.latent(x_TD),
            [shape.query_rank or 0, shape.latent_dim, shape.shared_dim, shape.heads * shape.gate_width],
            dim=-1,
        )

    def _in_latents(self, own_THO: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads, own] -> [T, heads, latent]."""
        changes = [] if self.adapted is None else self.adapted.of_step(len(own_THO))
        plain_THO = own_THO
        if any(change.gain_HO is not None for _, change in changes):
            plain_THO = own_THO.clone()
            for group, change in changes:
                if change.gain_HO is not None:
                    plain_THO[group.rows] *= change.gain_HO
        q_THC = torch.einsum("tho,hoc->thc", plain_THO, self.keys_HOC)
        for group, change in changes:
            q_THC[group.rows] += change.asked(own_THO[group.rows])
        return q_THC

    def _of_latents(self, o_THC: torch.Tensor) -> torch.Tensor:
        """Outputs [T, heads, latent] -> [T, heads, value]."""
        o_THV = torch.einsum("thc,hvc->thv", o_THC, self.values_HVC)
        for group, change in [] if self.adapted is None else self.adapted.of_step(len(o_THC)):
            if change.gain_HV is not None:
                o_THV[group.rows] *= change.gain_HV
            o_THV[group.rows] += change.given(o_THC[group.rows])
        return o_THV
