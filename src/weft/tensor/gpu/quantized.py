"""Tiles of quantised weights between memory and registers: shared by the int8 and int4 Triton kernels.

Codes are in the CPU kernels' order (``tensor.weights.quantized``): tiles of 16 rows, and in each tile 4 columns of all
rows at a time. So a block of BN rows and BK columns is BN / 16 dense blocks. They are loaded in that order, in 16-byte
loads, and registers reorder them at no cost:

    int8   [BN/16, BK/4 x 16 x 4] --view, permute--> W^T [BK, BN]
    int4   [BN/16, BK/8 x 16 x 4] --halves join----> [BN/16, BK/8, 16, 4, 2] --permute--> W^T [BK, BN]
    fp8    as int8

A code becomes a float by bit operations. Code less zero is exact. Its product with the scale is rounded once, to the
dtype of the other factor: these are the numbers of ``QuantizedWeight.dense``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.pages import FP8_NONE, fp8_kind, widen
from weft.tensor.weights.quantized import LINE, TILE_ROWS, QuantizedWeight

FORMS: dict[str, str] = {"codes": "*u8", "zeros": "*u8"}
"""Types of pointers to a weight, except its scales, which are float16 or float32."""


def constants_of(weight: QuantizedWeight) -> dict[str, Any]:
    """Return the compile-time constants of one matrix of ``weight``."""
    columns = weight.codes.shape[-3] * TILE_ROWS * 4 // (2 * weight.bits)
    fp8 = fp8_kind(torch.float8_e4m3fn, weight.device) if weight.fp8 else FP8_NONE
    return form(
        weight.bits,
        weight.codes.shape[-4] * TILE_ROWS,
        columns,
        weight.group,
        zeros=weight.zeros is not None,
        fp8=fp8,
        lanes=weight.scales.shape[-1],
    )


def form(
    bits: int, rows: int, columns: int, group: int, *, zeros: bool = False, fp8: int = FP8_NONE, lanes: int = TILE_ROWS
) -> dict[str, Any]:
    """Return the constants of one form. ``rows`` and ``columns`` as stored: complete tiles, complete lines. ``lanes``:
    scales of a tile's group.
    """
    return {
        "BITS": bits,
        "GROUP": group,
        "GROUPS": -(-columns // group),
        "TILES": rows // TILE_ROWS,
        "LINES": columns // LINE,
        "ZEROS": zeros,
        "FP8": fp8,
        "LANES": lanes,
    }


@triton.jit
def load_right(
    codes,
    scales,
    zeros,
    first,
    begin,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    LANES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALED: tl.constexpr = True,
):
    """Return W^T [BK, BN] float32 of one matrix: rows from ``first`` (a multiple of 16) on, columns from ``begin`` (a
    multiple of BK) on; zeros beyond its edges. A matrix has TILES of 16 rows and LINES of 32 columns. Without SCALED:
    its codes in fp8, as numbers.
    """
    STEP: tl.constexpr = 2 * BITS  # bytes of one column of 16 rows
    tile = first // 16 + tl.arange(0, BN // 16)
    piece = tl.arange(0, BK * STEP)
    code_mask = (tile < TILES)[:, None] & (begin * STEP + piece < LINES * 32 * STEP)[None, :]
    x = tl.load(
        codes + tile[:, None].to(tl.int64) * (LINES * 32 * STEP) + begin * STEP + piece[None, :],
        mask=code_mask,
        other=0,
    )
    if BITS == 4:
        x = tl.reshape(x, (BN // 16, BK // 8, 16, 4))
        x = tl.permute(tl.join(x & 15, x >> 4), (1, 4, 3, 0, 2))
    else:
        x = tl.permute(tl.reshape(x, (BN // 16, BK // 4, 16, 4)), (1, 3, 0, 2))
    x = tl.reshape(x, (BK, BN))
    if FP8 == 0:
        # 2^23 + code, less 2^23: the conversion unit takes 16 numbers a clock.
        wide = (x.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        wide = widen(x, FP8, tl.float32)
    if not SCALED:
        return wide
    line = begin // 32 + tl.arange(0, BK // 32)
    row = first + tl.arange(0, BN)
    offset = (row // 16)[None, :] * (GROUPS * LANES) + (line * 32 // GROUP)[:, None] * LANES
    offset += (row % LANES)[None, :]
    scale_mask = (line < LINES)[:, None] & (row < TILES * 16)[None, :]
    scale = tl.load(scales + offset, mask=scale_mask, other=0.0).to(tl.float32)
    wide = tl.reshape(wide, (BK // 32, 32, BN))
    if ZEROS:
        zero = tl.load(zeros + offset, mask=scale_mask, other=0).to(tl.float32)
        wide = wide - zero[:, None, :]
    elif FP8 == 0:
        wide = wide - (1 << (BITS - 1))
    return tl.reshape(wide * scale[:, None, :], (BK, BN))
