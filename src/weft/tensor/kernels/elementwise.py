"""sum_in_order, silu_mul and rotary in Triton. A program of sum_in_order is BLOCK numbers; one of silu_mul is BLOCK
columns of a row; one of rotary is 16 tokens of one head, in one launch for queries and keys.

In rotary each number has a partner half a rotary width away. So a tile is loaded twice, the second time with
its halves exchanged (from the L1 cache), and no tile is ever cut in two:

    x          a b | c d | rest         cos  1 2 | 1 2 | 1      x cos + partner sin; dims beyond the rotary
    partner    c d | a b | rest         sin -1-2 | 1 2 | 0      width stay unchanged
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import dense_rows, launch
from weft.tensor.gpu.pages import block_dim
from weft.tensor.gpu.products import after_previous
from weft.units import ceil_div

BLOCK = 1024
TOKENS = 16


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    parts, count = parts.contiguous(), parts[0].numel()
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    if count:
        launch(_sum_in_order, (ceil_div(count, BLOCK),))(parts, count, out, PARTS=len(parts), BLOCK=BLOCK)
    return out


@triton.jit(do_not_specialize=["count"])
def _sum_in_order(parts, count, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``parts`` [PARTS, count], part after part. Grid: blocks of ``count``."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    total = tl.load(parts + place, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * count.to(tl.int64) + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up_TJ: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    gate_up_TJ = dense_rows(gate_up_TJ)
    rows_TJ = gate_up_TJ if gate_up_TJ.ndim == 2 else gate_up_TJ.reshape(-1, gate_up_TJ.shape[-1])
    rows, width = rows_TJ.shape[0], rows_TJ.shape[1] // 2
    out = torch.empty((*gate_up_TJ.shape[:-1], width), dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
    if rows:
        launch(_silu_mul, (rows, ceil_div(width, BLOCK)))(
            rows_TJ, rows_TJ.stride(0), width, out, LIMIT=limit, BLOCK=BLOCK
        )
    return out


@triton.jit
def within(gate, up, LIMIT: tl.constexpr):
    """Return the gate limited to at most LIMIT, and ``up`` limited to it on both sides; 0: any. A NaN stays one."""
    if LIMIT > 0:  # the compiler needs a condition of more than a float
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def _silu_mul(gate_up, row_stride, width, out, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_up += row * row_stride
    gate = tl.load(gate_up + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + column, mask=mask, other=0.0).to(tl.float32)
    gate, up = within(gate, up, LIMIT)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=mask)


def rotary(
    q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q_THD, k_THD = dense_rows(q_THD), dense_rows(k_THD)
    tokens, heads, dim = q_THD.shape
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_THD))
    if tokens:
        launch(_rotary, (ceil_div(tokens, TOKENS), heads + k_THD.shape[1]))(
            q_THD,
            q_THD.stride(0),
            q_THD.stride(1),
            k_THD,
            k_THD.stride(0),
            k_THD.stride(1),
            *tables_of(cos_TD, sin_TD),
            q_out,
            k_out,
            tokens,
            k_THD.shape[1],
            HEADS=heads,
            ROTARY=cos_TD.shape[1],
            D=dim,
            BLOCK_D=block_dim(dim),
            TOKENS=TOKENS,
        )
    return q_out, k_out


def tables_of(cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return cos, sin and their row stride, the arguments of kernels."""
    cos_TD, sin_TD = dense_rows(cos_TD), dense_rows(sin_TD)
    assert cos_TD.stride(0) == sin_TD.stride(0)
    return cos_TD, sin_TD, cos_TD.stride(0)


@triton.jit
def partner_of(d, ROTARY: tl.constexpr):
    """Return the partner of each dim of ``d``; beyond the rotary width the dim itself."""
    half: tl.constexpr = ROTARY // 2
    return tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))


@triton.jit
def rotated(x, partner, cos, sin, table_stride, token, token_mask, d, ROTARY: tl.constexpr):
    """Return float32 [N, BLOCK_D] of tokens ``token``, rotated by their angles."""
    offset = token[:, None] * table_stride + d[None, :]
    angle_mask = token_mask[:, None] & (d < ROTARY)[None, :]
    by_cos = tl.load(cos + offset, mask=angle_mask, other=1.0).to(tl.float32)
    by_sin = tl.load(sin + offset, mask=angle_mask, other=0.0).to(tl.float32)
    return x * by_cos + partner * tl.where(d < ROTARY // 2, -1.0, 1.0)[None, :] * by_sin


@triton.jit
def _rotate_tile(
    x,
    x_token,
    x_head,
    head,
    cos,
    sin,
    table_stride,
    out,
    out_heads,
    token,
    token_mask,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate head ``head`` of tokens ``token`` [N] of ``x`` into ``out`` [T, out_heads, D]. ``cos``, ``sin`` [T,
    ROTARY].
    """
    d = tl.arange(0, BLOCK_D)
    tile_mask = token_mask[:, None] & (d < D)[None, :]
    rows = x + (token * x_token + head * x_head)[:, None]
    wide = tl.load(rows + d[None, :], mask=tile_mask, other=0.0).to(tl.float32)
    partner = tl.load(rows + partner_of(d, ROTARY)[None, :], mask=tile_mask, other=0.0).to(tl.float32)
    wide = rotated(wide, partner, cos, sin, table_stride, token, token_mask, d, ROTARY)
    tl.store(
        out + ((token * out_heads + head) * D)[:, None] + d[None, :], wide.to(out.dtype.element_ty), mask=tile_mask
    )


@triton.jit(do_not_specialize=["tokens"])
def _rotary(
    q,
    q_token,
    q_head,
    k,
    k_token,
    k_head,
    cos,
    sin,
    table_stride,
    q_out,
    k_out,
    tokens,
    kv_heads,
    HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rotate one head of TOKENS tokens. Grid: tiles of tokens, HEADS query heads then the KV heads.

    ``q`` [tokens, HEADS, D] and ``k`` [tokens, kv_heads, D] by strides in elements; ``cos``, ``sin`` [tokens,
    ROTARY]; ``q_out``, ``k_out`` dense, of the shapes of ``q`` and ``k``.
    """
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < tokens
    if head < HEADS:
        _rotate_tile(
            q, q_token, q_head, head, cos, sin, table_stride, q_out, HEADS, token, token_mask, ROTARY, D, BLOCK_D
        )
    else:
        _rotate_tile(
            k,
            k_token,
            k_head,
            head - HEADS,
            cos,
            sin,
            table_stride,
            k_out,
            kv_heads,
            token,
            token_mask,
            ROTARY,
            D,
            BLOCK_D,
        )
