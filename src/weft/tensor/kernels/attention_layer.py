"""attention_layer in Triton: one launch from the projection to the pages, then attention with its gates.

    projected_TW   | q heads | gate | k heads | v heads | head gates |
                  |               |         |
      place       '-- norm, rotary --> q    '-- norm, rotary --> K pages;  v --> V pages      one launch
      attend      q, pages --> softmax --> x value scale, gates --> out             (``paged_attention``)

Norms over all heads at once (``norm_whole``) need the full row, so they are separate launches. Between norm, rotary
and page, numbers are rounded to the model's dtype, as in the torch form.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import launch
from weft.tensor.gpu.pages import block_dim, rounded
from weft.tensor.gpu.products import after_previous
from weft.tensor.gpu.softmax import Gates
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.kernels.elementwise import partner_of, rotated, tables_of
from weft.tensor.kernels.norm import normed, rms_norm
from weft.tensor.kernels.paged_attention import DIM_MAX, attend
from weft.tensor.kernels.write_kv import (
    MOVING,
    TILE_TOKENS,
    VARYING,
    find_places,
    pages_of,
    places_of,
    tile_count,
    tile_tokens,
    write_rows,
)
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops.attention_layer import AttentionCore, CosSin


def attention_layer(
    projected_TW: torch.Tensor, core: AttentionCore, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
) -> torch.Tensor | Unfit:
    shape, scales = core.shape, cache.head_scales
    if shape.ring or not shape.usual or projected_TW.stride(1) != 1 or shape.head_dim > DIM_MAX:
        return UNFIT
    assert cache.k is not None, "an attention layer without pages"
    assert cache.v is not None, "an attention layer without pages"
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q_TC, gate_TC, k_TC, v_TC, head_gate_TH = torch.split(
        projected_TW,
        [q_width, q_width if shape.gated else 0, kv_width, kv_width, shape.heads if shape.head_gated else 0],
        dim=-1,
    )
    q_norm, k_norm = core.q_norm, core.k_norm
    if shape.norm_whole and q_norm is not None and k_norm is not None:
        q_TC, k_TC = (
            rms_norm(x, weight, core.norm_eps, plus_one=core.plus_one, gate=None, gate_first=False, group_size=None)
            for x, weight in ((q_TC, q_norm), (k_TC, k_norm))
        )
        q_norm = k_norm = None
    q_THD = _place_all(q_TC, k_TC, v_TC, q_norm, k_norm, core, inputs, cache, cos_sin)
    gates = Gates(
        gate_TC if shape.gated else None,
        head_gate_TH if shape.head_gated else None,
        None if scales is None else scales[1],
        core.sinks_of(projected_TW),
    )
    return attend(q_THD, cache.k, cache.v, inputs.runs, shape.scale, shape.window, cache.token_scales, gates).flatten(1)


def _place_all(
    q_TC: torch.Tensor,
    k_TC: torch.Tensor,
    v_TC: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    core: AttentionCore,
    inputs: StepInputs,
    cache: LayerCache,
    cos_sin: CosSin | None,
) -> torch.Tensor:
    """Write keys and values into their pages; return the queries [T, heads, D]."""
    shape, scales, runs = core.shape, cache.head_scales, inputs.runs
    assert cache.k is not None
    assert cache.v is not None
    q_THD = torch.empty((q_TC.shape[0], shape.heads, shape.head_dim), dtype=q_TC.dtype, device=q_TC.device)
    tables: tuple[Any, Any, int] = (None, None, 0)
    rotary_dim = 0
    if shape.rope is not None:
        assert cos_sin is not None, "a rotary layer in a model without rotary tables"
        tables, rotary_dim = tables_of(*cos_sin), cos_sin[0].shape[1]
    tiles = tile_count(runs)
    if tiles:
        launch(_place, (tiles, shape.heads + shape.kv_heads))(
            q_TC,
            q_TC.stride(0),
            k_TC,
            k_TC.stride(0),
            v_TC,
            v_TC.stride(0),
            q_norm,
            k_norm,
            core.norm_eps,
            *tables,
            *(None, None) if scales is None else (scales[0], scales[1]),
            q_THD,
            *pages_of(cache.k, cache.v, cache.token_scales),
            inputs.positions_T,
            *places_of(runs),
            HEADS=shape.heads,
            GROUP=shape.heads // shape.kv_heads,
            PLUS_ONE=core.plus_one,
            ROTARY=rotary_dim,
            D=shape.head_dim,
            BLOCK_D=block_dim(shape.head_dim),
            FP8=cache.k.dtype == torch.float8_e4m3fn,
            TOKENS=TILE_TOKENS,
        )
    return q_THD


@triton.jit
def _head(
    x,
    row,
    norm,
    eps,
    cos,
    sin,
    angle_stride,
    token,
    token_mask,
    PLUS_ONE: tl.constexpr,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return float32 [N, BLOCK_D]: a head's rows at ``x`` + token x row, normed and rotated."""
    d = tl.arange(0, BLOCK_D)
    tile_mask = token_mask[:, None] & (d < D)[None, :]
    rows = x + (token * row)[:, None]
    wide = tl.load(rows + d[None, :], mask=tile_mask, other=0.0).to(tl.float32)
    partner = wide
    other = partner_of(d, ROTARY)
    if ROTARY:
        partner = tl.load(rows + other[None, :], mask=tile_mask, other=0.0).to(tl.float32)
    if norm is not None:
        # The partners of a row are the same row: their sum of squares is equal.
        factor = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        wide = rounded(normed(wide, factor[None, :], eps, D, PLUS_ONE), x.dtype.element_ty)
        if ROTARY:
            factor = tl.load(norm + other, mask=d < D, other=0.0).to(tl.float32)
            partner = rounded(normed(partner, factor[None, :], eps, D, PLUS_ONE), x.dtype.element_ty)
    if ROTARY:
        wide = rounded(rotated(wide, partner, cos, sin, angle_stride, token, token_mask, d, ROTARY), x.dtype.element_ty)
    return wide


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=MOVING)
def _place(
    q,
    q_row,
    k,
    k_row,
    v,
    v_row,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    angle_stride,
    key_scale,
    value_scale,
    q_out,
    cache_k,
    cache_v,
    k_stride,
    v_stride,
    scales,
    scale_stride,
    scale_part,
    positions,
    table,
    table_stride,
    chunk_run,
    chunk_first,
    chunk_tokens,
    decode_count,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalise and rotate a head of 16 tokens; store queries in ``q_out``, keys and values in their pages. Grid:
    tiles of tokens, HEADS query heads then the KV heads.

    ``q`` [T, HEADS x D], ``k`` and ``v`` [T, kv_heads x D] by row strides; ``q_norm``, ``k_norm`` [D] or None;
    ``cos``, ``sin`` [T, ROTARY] or None; ``key_scale``, ``value_scale`` [kv_heads] of fp8 pages or None; ``q_out``
    [T, HEADS, D]; ``cache_k`` to ``scale_part`` as by ``pages_of``; ``positions`` int64 [T]; ``table`` to
    ``decode_count`` as by ``places_of``.
    """
    after_previous(PDL)
    head = tl.program_id(1)
    token, run, token_mask = tile_tokens(tl.program_id(0), chunk_run, chunk_first, chunk_tokens, decode_count, TOKENS)
    d = tl.arange(0, BLOCK_D)
    if head < HEADS:
        x = _head(
            q + head * D, q_row, q_norm, eps, cos, sin, angle_stride, token, token_mask, PLUS_ONE, ROTARY, D, BLOCK_D
        )
        # The key is divided by its scale below: the score is that of the unscaled key.
        if key_scale is not None:
            x *= tl.load(key_scale + head // GROUP).to(tl.float32)
        tl.store(
            q_out + ((token * HEADS + head) * D)[:, None] + d[None, :],
            x.to(q_out.dtype.element_ty),
            mask=token_mask[:, None] & (d < D)[None, :],
        )
    else:
        kv_head = head - HEADS
        page, place = find_places(positions, table, table_stride, token, run, token_mask)
        token_mask = page >= 0
        x = _head(
            k + kv_head * D, k_row, k_norm, eps, cos, sin, angle_stride, token, token_mask, PLUS_ONE, ROTARY, D, BLOCK_D
        )
        y = tl.load(
            v + (token * v_row)[:, None] + (kv_head * D + d)[None, :],
            mask=token_mask[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(tl.float32)
        if key_scale is not None:
            # Powers of two: the division is exact.
            x /= tl.load(key_scale + kv_head).to(tl.float32)
            y /= tl.load(value_scale + kv_head).to(tl.float32)
        v_scales = None
        if scales is not None:
            v_scales = scales + scale_part
        write_rows(x, cache_k, k_stride, scales, scale_stride, page, place, kv_head, D, BLOCK_D, FP8)
        write_rows(y, cache_v, v_stride, v_scales, scale_stride, page, place, kv_head, D, BLOCK_D, FP8)
