"""Tiles of keys and values between pages and registers: shared by every Triton kernel over pages.

A page stores K and V of one head as 16 rows each (``tensor.layout``). A tile of several pages is loaded unchanged, and
is K or V of a product in that layout. So it goes to shared memory without passing registers:

    pages [n x 16] --load--> rows [n x 16, D]     scores: q [M, D] . rows^T     output: weights . rows

Unwritten places are the caller's task: their scores are *replaced* by -inf and their values by 0 (L6).

fp8 is converted by hardware from compute capability 8.9 on, below it by bits. Writes round with integer operations, to
the nearest even, on every device. So a page has the same bytes whichever kernel wrote it. Only NaN has different bits
on different devices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor import gpu
from weft.tensor.gpu.launch import SMALL_SHARED

FP8_NONE, FP8_HARDWARE, FP8_BITS = 0, 1, 2
FP8_HARDWARE_OLDEST = 89
"""Lowest compute capability (times ten) that converts fp8."""


def fp8_kind(dtype: torch.dtype, device: torch.device) -> int:
    if dtype != torch.float8_e4m3fn:
        return FP8_NONE
    # The interpreter's conversion turns NaN into a number.
    if device.type != "cuda":
        return FP8_BITS
    return FP8_HARDWARE if capability_of(device) >= FP8_HARDWARE_OLDEST else FP8_BITS


def product_of(query: torch.dtype, page: torch.dtype) -> tuple[tl.dtype, str]:
    """Return the dtype of a product's factors, and its precision. Sums are always float32. The interpreter has no
    bfloat16 arithmetic. If no 16-bit dtype holds both factors exactly, tf32 does.
    """
    if gpu.INTERPRETED or torch.float32 in (query, page):
        return tl.float32, "ieee"
    if query == torch.bfloat16 and page != torch.float16:
        return tl.bfloat16, "tf32"
    if query == torch.float16 and page in (torch.float16, torch.float8_e4m3fn):
        return tl.float16, "tf32"
    return tl.float32, "tf32"


def capability_of(device: torch.device) -> int:
    """Return the compute capability times ten; in the interpreter that of an H100."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def small_shared(device: torch.device) -> bool:
    """Return whether programs on ``device`` have little shared memory: 99 KiB."""
    return capability_of(device) in SMALL_SHARED


def block_dim(dim: int) -> int:
    """Return a tile's width for heads of ``dim`` numbers; kernels mask the padding."""
    return max(16, 1 << (dim - 1).bit_length())


@triton.jit
def token_pages(table_row, first, end, PAGES: tl.constexpr):
    """Return int64 [PAGES x 16]: the page of each token from page ``first`` of the row on; PAD from page ``end`` on."""
    page = first + tl.arange(0, PAGES * 16) // 16
    # 64-bit: a page id times the bytes of a page passes 2^31.
    return tl.load(table_row + page, mask=page < end, other=-1).to(tl.int64)


@triton.jit
def load_rows(
    cache, page_stride, pages, FIRST: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):
    """Return [TOKENS, BLOCK_D]: numbers FIRST.. of full pages' tokens, as stored. ``cache``: the head's rows in page
    0; ``pages``: of ``token_pages``.
    """
    place, d = tl.arange(0, TOKENS) % 16, FIRST + tl.arange(0, BLOCK_D)
    mask = (pages >= 0)[:, None]
    if FIRST + BLOCK_D > D:
        mask = mask & (d < D)[None, :]
    return tl.load(cache + (pages * page_stride + place * D)[:, None] + d[None, :], mask=mask, other=0)


@triton.jit
def load_token_scales(scales, page_stride, pages, TOKENS: tl.constexpr):
    """Return float32 [TOKENS]. ``scales``: of the head and of K or V, in page 0."""
    place = tl.arange(0, TOKENS) % 16
    return tl.load(scales + pages * page_stride + place, mask=pages >= 0, other=0.0).to(tl.float32)


@triton.jit
def widen(x, FP8: tl.constexpr, PRODUCT: tl.constexpr):
    """Return a stored tile converted to the dtype of a product."""
    if FP8 == 1:
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FP8 == 2:
        # A float16 with the same bits is the number times 2^-8.
        half = ((x & 0x80).to(tl.uint16) << 8) | ((x & 0x7F).to(tl.uint16) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x = tl.where((x & 0x7F) == 0x7F, float("nan"), wide)
    elif x.dtype == tl.int8:
        # By bits: the conversion unit takes 16 numbers a clock, no faster than memory delivers. The float
        # is 2^23 + (x + 128), whose low bits are x + 128.
        bits = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32) | 0x4B000000
        x = bits.to(tl.float32, bitcast=True) - 8388736.0
    return x.to(PRODUCT)


@triton.jit
def to_nearest_bf16(x):
    """Return float32 rounded to a bfloat16 number, to the nearest even; NaN stays."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return float32 rounded to a number of DTYPE, to the nearest even."""
    if tl.bfloat16 == DTYPE:
        x = to_nearest_bf16(x)
    elif tl.float16 == DTYPE:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def fp8_bits(x):
    """Return the byte of e4m3 of float32 ``x``: nearest even, at most 448, NaN stays."""
    size = tl.abs(x)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.where(size > 448.0, 448.0, size)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are 2^-9: adding 2^23 rounds to whole steps, which are then the low bits.
    small = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | sign).to(tl.uint8)


@triton.jit
def quantized_rows(x, PER_MAX: tl.constexpr):
    """Return integers up to 127 (float32) of float32 [N, D], and their scales [N], rounded to bfloat16. As
    ``few_bits.quantized``.
    """
    broken = tl.max((x != x).to(tl.int32), axis=1)
    most = tl.where(broken > 0, float("nan"), tl.max(tl.abs(x), axis=1))
    scale = to_nearest_bf16(most * PER_MAX)
    over = tl.where(scale == 0, 1.0, scale)
    exact = tl.div_rn(x, tl.broadcast_to(over[:, None], x.shape))
    exact = tl.where(exact > 127.0, 127.0, tl.where(exact < -127.0, -127.0, exact))
    # Adding 1.5 x 2^23 leaves no bits for a fraction: this rounds to the nearest even.
    whole = (exact + 12582912.0) - 12582912.0
    return tl.where(whole == whole, whole, 0.0), scale
