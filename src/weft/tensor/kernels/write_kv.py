"""write_kv in one launch: a program is 16 tokens of one KV head.

    tiles of the step     | decodes 0..15 | decodes 16..31 | chunk 0: 4 tiles | chunk 1: 4 tiles | ...

A decode's token is its own run; a chunk's tokens (``gpu.runs``) belong to one run. A token's numbers of one
head are one row of a page (``tensor.layout``), so each is one dense store. The attention layer uses
``tile_tokens`` and ``write_rows`` after rotary in its one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor import native
from weft.tensor.few_bits import PER_INT8_MAX, as_bytes
from weft.tensor.gpu.launch import dense_rows, launch
from weft.tensor.gpu.pages import block_dim, fp8_bits, quantized_rows, to_nearest_bf16
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs
from weft.tensor.layout import k_rows, v_rows
from weft.units import CHUNK_TOKENS, ceil_div

TILE_TOKENS = 16
TILES_PER_CHUNK = CHUNK_TOKENS // TILE_TOKENS
VARYING = ["table_stride", "decode_count"]
"""Integers that change from step to step: kernels do not specialise on their values."""
MOVING = ["positions", "chunk_run", "chunk_first", "chunk_tokens"]
"""Views into the step's table of integers, which begin anywhere in it."""
PER_MAX = tl.constexpr(PER_INT8_MAX)


def write_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    positions_T: torch.Tensor,
    runs: Runs,
    scales: torch.Tensor | None = None,
) -> None:
    k_THD, v_THD = dense_rows(k_THD), dense_rows(v_THD)
    kv_heads, dim = k_THD.shape[1:]
    tiles = tile_count(runs)
    if tiles == 0:
        return
    launch(_write, (tiles, kv_heads))(
        k_THD,
        v_THD,
        k_THD.stride(0),
        k_THD.stride(1),
        v_THD.stride(0),
        v_THD.stride(1),
        *pages_of(cache_k, cache_v, scales),
        positions_T,
        *places_of(runs),
        D=dim,
        BLOCK_D=block_dim(dim),
        FP8=cache_k.dtype == torch.float8_e4m3fn,
        TOKENS=TILE_TOKENS,
        num_warps=4,
    )


def tile_count(runs: Runs) -> int:
    """Return the number of programs that cover the step's tokens, 16 at once."""
    chunks = device_runs(runs).chunk_count if runs.decode_count < runs.run_count else 0
    return ceil_div(runs.decode_count, TILE_TOKENS) + chunks * TILES_PER_CHUNK


def pages_of(
    cache_k: torch.Tensor, cache_v: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, int, torch.Tensor | None, int, int]:
    """Return kernel arguments: k, v, their page strides; scales, their page stride and the stride from K to V."""
    assert cache_k.dtype == cache_v.dtype, f"K pages of {cache_k.dtype}, V pages of {cache_v.dtype}"
    cache_k, cache_v = k_rows(cache_k), v_rows(cache_v)
    k_stride, v_stride = native.slot_stride(cache_k), native.slot_stride(cache_v)
    if scales is None:
        return as_bytes(cache_k), as_bytes(cache_v), k_stride, v_stride, None, 0, 0
    assert scales.stride(-1) == 1
    assert scales.stride(2) == scales.shape[3]
    return (as_bytes(cache_k), as_bytes(cache_v), k_stride, v_stride, scales, scales.stride(0), scales.stride(1))


def places_of(runs: Runs) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return kernel arguments: table, its row stride, chunk_run, chunk_first, chunk_tokens, decodes."""
    table = runs.page_table_RP
    assert table.stride(1) == 1 or table.shape[1] == 1
    if runs.decode_count == runs.run_count:  # no chunks: never read
        return table, table.stride(0), table, table, table, runs.decode_count
    known = device_runs(runs)
    return (table, table.stride(0), known.chunk_run_C, known.chunk_first_C, known.chunk_tokens_C, runs.decode_count)


@triton.jit
def tile_tokens(tile, chunk_run, chunk_first, chunk_tokens, decode_count, TOKENS: tl.constexpr):
    """Return (index in T int64, run int64, mask of valid tokens), [TOKENS] each."""
    lane = tl.arange(0, TOKENS)
    decode_tiles = tl.cdiv(decode_count, TOKENS)
    in_chunk = tile >= decode_tiles
    chunk = tl.maximum(tile - decode_tiles, 0) // (64 // TOKENS)
    place = tl.maximum(tile - decode_tiles, 0) % (64 // TOKENS) * TOKENS + lane
    first = tl.load(chunk_first + chunk, mask=in_chunk, other=0)
    count = tl.load(chunk_tokens + chunk, mask=in_chunk, other=0)
    run = tl.load(chunk_run + chunk, mask=in_chunk, other=0)
    decode = tile * TOKENS + lane
    token = tl.where(in_chunk, first + place, decode)
    token_mask = tl.where(in_chunk, place < count, decode < decode_count)
    return token.to(tl.int64), tl.where(in_chunk, run, decode).to(tl.int64), token_mask


@triton.jit
def find_places(positions, table, table_stride, token, run, token_mask):
    """Return (page int64 or PAD, place in the page) of each token."""
    position = tl.load(positions + token, mask=token_mask, other=-1)
    # PAD positions and PAD pages write nothing (L4).
    token_mask = token_mask & (position >= 0)
    page = tl.load(table + run * table_stride + position // 16, mask=token_mask, other=-1)
    return page.to(tl.int64), (position % 16).to(tl.int32)


@triton.jit
def stored(x, cache, FP8: tl.constexpr):
    """Return float32 ``x`` converted to the numbers of a page."""
    if FP8:
        return fp8_bits(x)
    if cache.dtype.element_ty == tl.bfloat16:
        x = to_nearest_bf16(x)
    elif cache.dtype.element_ty == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(cache.dtype.element_ty)


@triton.jit
def write_rows(
    x,
    cache,
    page_stride,
    scales,
    scale_stride,
    page,
    place,
    head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write float32 [N, BLOCK_D], zeros beyond D, into the K or V blocks of ``head``."""
    d = tl.arange(0, BLOCK_D)
    if scales is not None:
        x, scale = quantized_rows(x, PER_MAX)
        tl.store(scales + page * scale_stride + head * 16 + place, scale.to(tl.bfloat16), mask=page >= 0)
    row = cache + (page * page_stride + (head * 16 + place) * D)[:, None]
    tl.store(row + d[None, :], stored(x, cache, FP8), mask=(page >= 0)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=MOVING)
def _write(
    k,
    v,
    k_token,
    k_head,
    v_token,
    v_head,
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1)
    token, run, token_mask = tile_tokens(tl.program_id(0), chunk_run, chunk_first, chunk_tokens, decode_count, TOKENS)
    page, place = find_places(positions, table, table_stride, token, run, token_mask)
    d = tl.arange(0, BLOCK_D)
    tile_mask = (page >= 0)[:, None] & (d < D)[None, :]
    x = tl.load(k + token[:, None] * k_token + head * k_head + d[None, :], mask=tile_mask, other=0.0)
    y = tl.load(v + token[:, None] * v_token + head * v_head + d[None, :], mask=tile_mask, other=0.0)
    v_scales = None
    if scales is not None:
        v_scales = scales + scale_part
    write_rows(x.to(tl.float32), cache_k, k_stride, scales, scale_stride, page, place, head, D, BLOCK_D, FP8)
    write_rows(y.to(tl.float32), cache_v, v_stride, v_scales, scale_stride, page, place, head, D, BLOCK_D, FP8)
