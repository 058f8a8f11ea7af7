"""weight_product of weights with ``byte_inputs``, in Triton: the steps and the bits of the torch form.

    _round     a program: (row of x, part)       128 columns -> codes, and a scale: largest / 127
                                                 (e4m3 for weights in fp8: / 448)
    _product   a program: (BN rows of the weight, BM rows of x)
                   part after part:  total += sum(int8 x int8, exact) * (weight's scale * x's scale)

Operations after the sum of a part are float32 in one order, each step rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Blocks, dense_rows, launch
from weft.tensor.gpu.pages import fp8_bits
from weft.tensor.weights.quantized import PART, QuantizedWeight

LEAST = tl.constexpr(1e-30)
"""Least magnitude of a part, as in ``ops.linear``."""
ROUND = Blocks(PART, warps=1)
_FEW_ROWS = 16


@triton.jit(do_not_specialize=["rows"])
def _round(x, codes, scales, x_row, rows, parts, COLUMNS: tl.constexpr, PLACES: tl.constexpr, FP8: tl.constexpr):
    """Round one part of a row. ``codes`` int8 [R, parts, 128], or with FP8 bytes of e4m3; ``scales`` float32 [parts,
    ``rows``].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, PLACES)
    column = part * PLACES + place
    wide = tl.load(x + row * x_row + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    reach = tl.max(tl.abs(wide), axis=0)
    broken = tl.sum(((wide != wide) | (tl.abs(wide) == float("inf"))).to(tl.int32), axis=0) > 0
    some = (broken == 0) & (reach >= LEAST)
    over = tl.where(some, reach, 1.0)
    most = tl.full((), 448.0 if FP8 else 127.0, tl.float32)
    exact = tl.where(some, wide, 0.0) * tl.div_rn(most, over)
    index = row * parts + part
    if FP8:
        tl.store(codes + index * PLACES + place, fp8_bits(exact))
    else:
        # Adding 1.5 x 2^23 leaves no bits for a fraction: this rounds to the nearest even.
        tl.store(codes + index * PLACES + place, ((exact + 12582912.0) - 12582912.0).to(tl.int8))
    scale = tl.where(some, tl.div_rn(reach, most), 0.0)
    tl.store(scales + part * rows + row, tl.where(broken, float("nan"), scale))


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    x_scales,
    codes,
    scales,
    bias,
    out,
    rows,
    columns_out,
    parts,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    PLACES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Write ``out`` [rows, columns_out]. Grid: blocks of BN columns of ``out``, blocks of BM rows.

    ``x`` int8 [rows, parts, 128] with ``x_scales`` float32 [parts, rows]; ``codes`` and ``scales`` of the weight as in
    ``tensor.gpu.quantized``; ``bias`` float32 [columns_out].
    """
    row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    first, place, here = tl.program_id(0) * BN, tl.arange(0, PLACES), row < rows
    tile, piece = first // 16 + tl.arange(0, BN // 16), tl.arange(0, PLACES * 16)
    column = first + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for part in range(parts):
        left = tl.load(x + (row[:, None] * parts + part) * PLACES + place[None, :], mask=here[:, None], other=0)
        inside = (tile < TILES)[:, None] & (part * (PLACES * 16) + piece < LINES * 512)[None, :]
        stored = tl.load(
            codes + tile[:, None].to(tl.int64) * (LINES * 512) + part * (PLACES * 16) + piece[None, :],
            mask=inside,
            other=128,
        )
        signed = (stored ^ 0x80).to(tl.int8, bitcast=True)
        right = tl.permute(tl.reshape(signed, (BN // 16, PLACES // 4, 16, 4)), (1, 3, 0, 2))
        sums = tl.dot(left, tl.reshape(right, (PLACES, BN)), out_dtype=tl.int32)
        offset = (column // 16) * (GROUPS * 16) + (part * PLACES // GROUP) * 16 + column % 16
        of_weight = tl.load(scales + offset, mask=column < TILES * 16, other=0.0).to(tl.float32)
        of_x = tl.load(x_scales + part * rows + row, mask=here, other=0.0)
        total += sums.to(tl.float32) * (of_weight[None, :] * of_x[:, None])
    within = column < columns_out
    if BIAS:
        total += tl.load(bias + column, mask=within, other=0.0)[None, :]
    tl.store(
        out + row[:, None] * columns_out + column[None, :],
        total.to(out.dtype.element_ty),
        mask=here[:, None] & within[None, :],
    )


def blocks_of(rows: int) -> tuple[int, Blocks]:
    """Return (BM, BN in Blocks) for ``rows`` rows of x."""
    return (16, Blocks(32, stages=4)) if rows <= _FEW_ROWS else (64, Blocks(64, stages=3))


def rounded(x_RI: torch.Tensor, *, fp8: bool = False, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes int8 (or bytes of e4m3, uint8) [R, parts, 128], and scales float32 [parts, R]. R is padded to a
    ``multiple``; the contents of the additional rows are unspecified.
    """
    rows, columns = x_RI.shape
    parts, padded_rows = -(-columns // PART), -(-rows // multiple) * multiple
    codes = torch.empty((padded_rows, parts, PART), dtype=torch.uint8 if fp8 else torch.int8, device=x_RI.device)
    scales = torch.empty((parts, padded_rows), dtype=torch.float32, device=x_RI.device)
    launch(_round, (rows, parts))(
        x_RI,
        codes,
        scales,
        x_RI.stride(0),
        padded_rows,
        parts,
        COLUMNS=columns,
        PLACES=PART,
        FP8=fp8,
        num_warps=ROUND.warps,
        enable_fp_fusion=False,
    )
    return codes, scales


def byte_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    x_RI = dense_rows(x.reshape(-1, weight.columns))
    rows, parts = x_RI.shape[0], -(-weight.columns // PART)
    out = torch.empty((rows, weight.rows), dtype=x.dtype, device=x.device)
    if rows:
        codes, scales = rounded(x_RI)
        block_rows, blocks = blocks_of(rows)
        lines, tiles, groups = weight.codes.shape[-3] // 8, weight.codes.shape[-4], weight.scales.shape[-2]
        launch(_product, (triton.cdiv(weight.rows, blocks.width), triton.cdiv(rows, block_rows)))(
            codes,
            scales,
            weight.codes,
            weight.scales,
            weight.scales if bias is None else bias,
            out,
            rows,
            weight.rows,
            parts,
            BIAS=bias is not None,
            GROUP=max(weight.group, PART),
            GROUPS=groups,
            TILES=tiles,
            LINES=lines,
            PLACES=PART,
            BM=block_rows,
            BN=blocks.width,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            enable_fp_fusion=False,
        )
    return out.view(*x.shape[:-1], weight.rows)
