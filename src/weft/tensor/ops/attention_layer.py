"""Attention layer between its two projections: norms, rotary, write, read, output gates.

In C++ (csrc/layers.cpp) the layer's up to seven kernels are one call, with both projections or without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from weft.families.mixers.attention import Attention, KeyIndex
from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.ops import mean_keys
from weft.tensor.ops.chosen_blocks import Seen, attend_seen
from weft.tensor.ops.elementwise import each, rotary
from weft.tensor.ops.norm import rms_norm
from weft.tensor.ops.paged_attention import DIM_MAX, paged_attention
from weft.tensor.ops.relative_bias import apart
from weft.tensor.ops.whole_attention import whole_attention
from weft.tensor.ops.window_attention import window_attention
from weft.tensor.ops.write_kv import write_kv

CosSin = tuple[torch.Tensor, torch.Tensor]
Choose = Callable[[torch.Tensor], Seen]
"""Function from queries [T, heads, D] to the tokens that each sees. The step's keys are written."""


@dataclass(slots=True)
class AttentionCore:
    """Attention layer without its projections. The weights of the norms of q and k come together or not at all: [D],
    or over all heads if ``shape.norm_whole`` or ``shape.norm_by_head``. Immutable once a layer has run.
    """

    shape: Attention
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    plus_one: bool
    sinks: torch.Tensor | None = None
    """float32 [heads]: scores that take part in each sum and add nothing."""
    v_norm: torch.Tensor | None = None
    """Ones [D], if ``shape.values_normed``."""
    norm_biases: tuple[torch.Tensor, torch.Tensor] | None = None
    """[D] each, of the norms of q and k, if ``shape.norm_centred`` is "bias"."""
    bank: torch.Tensor | None = None
    """float32 [R, extent], of scores that have a bias by distance."""
    slopes: torch.Tensor | None = None
    """float32 [heads]: states of the bias that are the same in every query, if ``shape.alibi``."""
    bound: Any = field(default=None, repr=False, compare=False)
    """C++ object, after the first step."""

    def sinks_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the sinks of each of ``rows`` [T, ...]: [T, heads], with a stride of 0."""
        return None if self.sinks is None else self.sinks.as_strided((len(rows), len(self.sinks)), (0, 1))


@op("weft.tensor.kernels.attention_layer")
def attention_layer(
    projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
) -> torch.Tensor:
    """Return the input [T, heads * D] of the output projection. ``projected_TW`` [T, W]: output of the input
    projection, columns q, gate (if ``shape.gated``), k, v, head gates (if ``shape.head_gated``).

        q, k <- norms, per head or over all heads        q, k <- rotary(q, k)
        write_kv(k, v);   o = paged_attention(q)         or, for a ring, window_attention(q, k, v)
        o sigmoid(head gate) sigmoid(gate)               or, in Laguna, softplus

    A layer that reads another's pages has only columns q, and ``cache`` is that layer's.

    Writes the pages, or the ring, of ``cache``. Values between the ops are rounded to the dtype of
    ``projected_TW``.

    Sources of the gates: transformers, ``Qwen3NextAttention`` and ``Lfm3Attention``.
    """
    return seen_layer(projected_TW, core, inputs, cache, cos_sin, None)


def choosing_layer(
    projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
) -> torch.Tensor:
    """Return ``attention_layer`` with heads whose tokens are chosen by the layer's own keys (``mean_keys``)."""
    shape, runs = core.shape, inputs.runs
    index = shape.index
    assert isinstance(index, KeyIndex)
    if mean_keys.sees_all(runs, index):
        o_TC = attention_layer(projected_TW, core, inputs, cache, cos_sin)
        mean_keys.write_means(cache, runs, index)
        return o_TC

    def choose(q_THD: torch.Tensor) -> Seen:
        mean_keys.write_means(cache, runs, index)
        return mean_keys.choose_by_means(q_THD, cache, runs, index, shape.scale)

    return seen_layer(projected_TW, core, inputs, cache, cos_sin, choose)


def seen_layer(
    projected_TW: torch.Tensor,
    core: AttentionCore,
    inputs: StepInputs,
    cache: LayerCache,
    cos_sin: CosSin | None,
    seen: Seen | Choose | None,
) -> torch.Tensor:
    """Return ``attention_layer`` in torch, with tokens that see the tokens of ``seen``."""
    q_THD, gate, k_THD, v_THD, head_gate_TH = _split(projected_TW, core)
    q_THD, k_THD = _turned(q_THD, k_THD, core, cos_sin)
    if (growth := core.shape.growth) is not None:
        reached_T = ((inputs.positions_T + growth.first).clamp_min(0) // growth.tokens).float()
        factor_T = 1.0 + growth.factor * each(torch.log1p, reached_T)
        q_THD = (q_THD.float() * factor_T[:, None, None]).to(q_THD.dtype)
    if core.slopes is not None:  # in float32: not every slope is a number of 16 bits
        q_THD = torch.cat((q_THD.float(), core.slopes[:, None].expand(len(q_THD), -1, -1)), -1)
    o_THD = attend(q_THD, k_THD, v_THD, core, inputs, cache, seen, core.sinks_of(q_THD)).to(projected_TW.dtype)
    if core.shape.out_normed:
        assert core.q_norm is not None, "a norm of heads without the weight of queries"
        o_THD = rms_norm(o_THD, core.q_norm, core.norm_eps)
    gated = _softplus if core.shape.softplus_gate else torch.sigmoid
    if head_gate_TH is not None:
        o_THD = o_THD * gated(head_gate_TH)[..., None]
    o_TC = o_THD.flatten(1)
    return o_TC if gate is None else o_TC * gated(gate)


def _softplus(gate: torch.Tensor) -> torch.Tensor:
    return each(F.softplus, gate.float()).to(gate.dtype)


def write_projected(
    projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
) -> None:
    """Write keys, their means and values, the writing part of ``attention_layer``, for a layer with pages."""
    q_THD, _, k_THD, v_THD, _ = _split(projected_TW, core)
    _, k_THD = _turned(q_THD, k_THD, core, cos_sin)
    scales = cache.head_scales
    if scales is not None:
        k_THD, v_THD = k_THD / scales[0, :, None], v_THD / scales[1, :, None]
    assert cache.k is not None, "an attention layer without pages"
    assert cache.v is not None, "an attention layer without pages"
    write_kv(k_THD, v_THD, cache.k, cache.v, inputs.positions_T, inputs.runs, cache.token_scales)
    if isinstance(core.shape.index, KeyIndex):
        mean_keys.write_means(cache, inputs.runs, core.shape.index)


def _turned(
    q_THD: torch.Tensor, k_THD: torch.Tensor, core: AttentionCore, cos_sin: CosSin | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys at their positions, normed where the norms come after the rotary embedding."""
    if core.shape.rope is not None:
        assert cos_sin is not None, "a rotary layer in a model without rotary tables"
        q_THD, k_THD = rotary(q_THD, k_THD, *cos_sin)  # no keys: no heads of them
    if core.shape.norm_after and core.q_norm is not None and core.k_norm is not None:
        q_THD, k_THD = (
            rms_norm(x, weight, core.norm_eps, plus_one=core.plus_one)
            for x, weight in ((q_THD, core.q_norm), (k_THD, core.k_norm))
        )
    return q_THD, k_THD


def attend(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    core: AttentionCore,
    inputs: StepInputs,
    cache: LayerCache,
    seen: Seen | Choose | None,
    sinks_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write keys and values, then return the attention over them. With ``core.bank`` the states of the biases follow
    the queries. ``sinks_TH``: as of ``paged_attention``. A layer that is not causal reads the step's own keys and
    writes none: its prompts are complete.
    """
    shape, scales, asked_THD = core.shape, cache.head_scales, q_THD
    if not shape.causal:
        return whole_attention(q_THD, k_THD, v_THD, inputs.runs, shape.scale, shape.window, sinks_TH, shape.cap)
    if scales is not None:
        if shape.kv_of is None:
            k_THD, v_THD = k_THD / scales[0, :, None], v_THD / scales[1, :, None]
        q_THD, states_THR = apart(q_THD, core.bank)
        q_THD = torch.cat((by_kv_head(q_THD, scales[0]), states_THR), -1)
    if shape.ring:
        o_THD = window_attention(
            q_THD, k_THD, v_THD, cache.state["window"], inputs.runs, shape.scale, sinks_TH, core.bank, shape.cap
        )
    else:
        assert cache.k is not None, "an attention layer without pages"
        assert cache.v is not None, "an attention layer without pages"
        if shape.kv_of is None:
            write_kv(k_THD, v_THD, cache.k, cache.v, inputs.positions_T, inputs.runs, cache.token_scales)
        if seen is None:
            o_THD = paged_attention(
                q_THD,
                cache.k,
                cache.v,
                inputs.runs if shape.chunk is None else inputs.runs.in_chunks(shape.chunk),
                shape.scale,
                shape.window,
                cache.token_scales,
                sinks_TH,
                core.bank,
                shape.cap,
            )
        else:
            seen = seen(asked_THD) if callable(seen) else seen
            o_THD = attend_seen(q_THD, cache, inputs.runs, shape.scale, seen)
    return o_THD if scales is None else by_kv_head(o_THD, scales[1])


def _split(
    projected_TW: torch.Tensor, core: AttentionCore
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return q by head, the gate [T, heads * D], k and v by head, the head gates [T, heads]; q, k normed."""
    shape = core.shape
    if shape.clip:
        projected_TW = projected_TW.clamp(-shape.clip, shape.clip)
    q_width, kv_width = shape.heads * shape.head_dim, shape.own_kv_heads * shape.head_dim
    q, gate, k, v, head_gate_TH = torch.split(
        projected_TW,
        [
            q_width,
            q_width if shape.gated else 0,
            kv_width,
            0 if shape.values_are_keys else kv_width,
            shape.heads if shape.head_gated else 0,
        ],
        dim=-1,
    )
    v = k if shape.values_are_keys else v
    q_weight, k_weight = core.q_norm, core.k_norm

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if shape.norm_centred:
            x_THD, weights_HD = (torch.unflatten(rows, -1, (-1, shape.head_dim)) for rows in (x, weight))
            return (F.layer_norm(x_THD, (shape.head_dim,), eps=core.norm_eps) * weights_HD).view_as(x)
        group = shape.head_dim if shape.norm_by_head else None
        return rms_norm(x, weight, core.norm_eps, plus_one=core.plus_one, group_size=group)

    before = shape.norm_whole or shape.norm_by_head
    if q_weight is not None and k_weight is not None and before:
        q, k = normed(q, q_weight), normed(k, k_weight)
    q_THD, k_THD, v_THD = (_by_head(x, shape.head_dim) for x in (q, k, v))
    by_head = not before and not shape.norm_after
    if q_weight is not None and by_head:
        q_THD = normed(q_THD, q_weight)
    if k_weight is not None and by_head:
        k_THD = normed(k_THD, k_weight)
    if core.norm_biases is not None:
        q_THD, k_THD = q_THD + core.norm_biases[0], k_THD + core.norm_biases[1]
    if core.v_norm is not None:
        v_THD = rms_norm(v_THD, core.v_norm, core.norm_eps)
    return (q_THD, gate if shape.gated else None, k_THD, v_THD, head_gate_TH if shape.head_gated else None)


def _by_head(x_TC: torch.Tensor, dim: int) -> torch.Tensor:
    return x_TC.reshape(x_TC.shape[0], x_TC.shape[1] // dim, dim)


def by_kv_head(x_THD: torch.Tensor, scale_H: torch.Tensor) -> torch.Tensor:
    """Return ``x_THD`` [T, heads, D] times the scale of its KV head ([kv_heads], powers of two)."""
    tokens, heads, dim = x_THD.shape
    return (x_THD.view(tokens, len(scale_H), -1, dim) * scale_H[:, None, None]).view(tokens, heads, dim)


def _takes(x_TW: torch.Tensor, core: AttentionCore, cache: LayerCache) -> bool:
    return (
        native.fits(x_TW)
        and not core.shape.ring
        and core.shape.usual
        and cache.head_scales is None
        and x_TW.stride(1) == 1
        and core.shape.head_dim % native.LANES == 0
        and core.shape.head_dim <= DIM_MAX
        and cache.k is not None
        and cache.k.dtype in native.KV_DTYPES
        and (core.q_norm is None or core.q_norm.dtype in native.DTYPES)
    )


@attention_layer.in_cpp
def _attention_layer(
    projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
) -> torch.Tensor | Unfit:
    if not _takes(projected_TW, core, cache):
        return UNFIT
    shape = core.shape
    out_TC = torch.empty((projected_TW.shape[0], shape.heads * shape.head_dim), dtype=projected_TW.dtype)
    _bound(core).run(
        native.runs_of(inputs.runs),
        native.output_runs_of(inputs),
        native.projected_of(projected_TW),
        *_around(core, inputs, cache, cos_sin),
        out_TC.data_ptr(),
    )
    return out_TC


def staged(fused: FusedBlock, x_TD: torch.Tensor, core: AttentionCore, cache: LayerCache) -> FusedLayer | None:
    """Return the same layer for the fused decoder (``weft.models.fused_decoder``)."""
    if fused.bound(x_TD) is None or not _takes(x_TD, core, cache):
        return None
    k_pages, v_pages = _pages(cache)
    return FusedLayer(
        fused, 4, _bound(core), first=k_pages, second=v_pages, scales=native.token_scales(cache.token_scales)
    )


def _pages(cache: LayerCache) -> tuple[Any, Any]:
    assert cache.k is not None
    assert cache.v is not None
    assert cache.k.dtype == cache.v.dtype, f"K pages of {cache.k.dtype}, V pages of {cache.v.dtype}"
    return native.pages_of(cache.k), native.pages_of(cache.v)


def _around(core: AttentionCore, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> Any:
    """Return the other arguments of a layer: rotary tables, pages, the page table, scales."""
    angles = (0, 0, 0)
    if core.shape.rope is not None:
        assert cos_sin is not None, "a rotary layer in a model without rotary tables"
        angles = (*native.angles_of(*cos_sin), cos_sin[0].shape[1])
    return (*angles, *_pages(cache), *native.page_table_of(inputs.runs), *native.token_scales(cache.token_scales))


def _bound(core: AttentionCore) -> Any:
    """Return the layer's C++ object, built by its first step."""
    if core.bound is None:
        core.bound = _bind(core)
    return core.bound


def _bind(core: AttentionCore) -> Any:
    shape = core.shape
    norms = []
    for weight, heads in ((core.q_norm, shape.heads), (core.k_norm, shape.kv_heads)):
        if weight is None:
            norms.append((0, 0, 0.0))
            continue
        assert weight.is_contiguous()
        assert weight.shape == (shape.head_dim * (heads if shape.norm_whole else 1),)
        norms.append((weight.data_ptr(), native.DTYPES[weight.dtype], core.norm_eps))
    assert (norms[0][0] == 0) == (norms[1][0] == 0), "norms of q and k come together"
    return native.extension().AttentionLayer(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.gated,
        shape.head_gated,
        shape.norm_whole,
        *norms,
        core.plus_one,
        shape.scale,
        shape.window or 0,
        native.address_of(core.sinks),
    )
