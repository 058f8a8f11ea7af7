"""Building blocks of several Triton kernels: products, sums of log decays, the inverse of a chunk's triangle,
the rounding of states (the same bits as ``tensor.rounding``), split columns, programmatic launches.

Precision. States are snapshots: a prefill must leave the same state in a slot as decodes. So products with a float32
operand keep float32's precision. Tensor cores take 8 (bf16), 11 (fp16, tf32) bits:

    16 bits x 16 bits (same dtype)   one product; exact, except for the sum
    bf16    x float32                three products: b = b1 + b2 + b3, bf16 each, which has all 24 bits of b.
                                     1.5 times the work of one tf32 product; a stays in 16 bits in shared
                                     memory and may be transposed there, which Hopper's tf32 products cannot
    pair    x float32                five products: the pair is two bf16 numbers, off by 2^-17 at most. Only for
                                     chunks' triangles in models of 16 bits (docs/decisions/gpu.md, 0055)
    other   x float32                tf32x3: both halves of both, less the smallest of the four products
    numbers of at most some 2        three products of fp16 halves, 22 bits of each: as exact as tf32x3, half the work

With ``SIDES`` the first two parts of b are the columns of one product. An instruction of Hopper's tensor cores with 32
columns takes little longer than one with 16:

    a [64, K]  x  [ b1 | b2 ] [K, 2 x 16]  -->  [ a b1 | a b2 ],  and their sum  + a b3

Sums of log decays. Differences of sums need some 1e-7, where the sums are in the hundreds: more than float32
has. Each term is clamped to -128 and cut into a multiple of 2^-10 and a rest of at most 2^-11. The multiples
of 64 terms add up to at most 2^13, so their float32 sums are exact in any order. The rests add up to at most
2^-5, so a difference of two sums errs by at most 2^-23 (1.2e-7) before its own rounding.

Split columns ("split-K"). A product of few rows is bound by reading the weight, and few programs leave most
of a GPU's memory channels idle. So the summed columns are split over programs:

    weight [rows, columns]    program (block of rows, split)     split: DEPTH columns of all
    partials float32 [splits, rows of x, rows]  --one launch, split 0 first-->  out, rounded once
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft.tensor import gpu

INTERPRETED = tl.constexpr(gpu.INTERPRETED)
LOG_DECAY_MIN = tl.constexpr(-80.0)
"""Least log decay, as in ``weft.tensor.chunks``: smaller ones are clamped to it."""
LOG_DECAY_FLOOR = tl.constexpr(-128.0)
"""Least log decay of a single token, so that sums are exact in parts, and finite."""
_TO_UNITS = tl.constexpr(1.5 * 2**13)
"""Number that is added and subtracted to round to a multiple of 2^-10."""
BASE = tl.constexpr(8)
"""Side of the blocks that substitution inverts. With 16, the 15 rounds of a chunk are more instructions than the 7 of 8
and the products of one more level.
"""


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended, and let the next one be placed: the first statement of kernels
    that are launched programmatically (``gpu.launch``). Nothing may be read or written before it.
    """
    if PDL and not INTERPRETED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def only_if(condition, count):
    """Return ``count``, or 0: the bound of a mask."""
    # Instead of a mask combined with a scalar: the interpreter turns a broadcast condition into integers.
    return tl.where(condition, count, 0)


@triton.jit
def product(a, b):
    """Return a @ b of one dtype, float32."""
    # The interpreter has no bf16 arithmetic: 16-bit numbers become float32 before every product.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _leading(x):
    """Return float32 ``x`` with its first 8 bits only, as in bfloat16; cut off, not rounded."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(x):
    """Return float32 ``x``, whose lower 16 bits are zero, in bfloat16; in the interpreter as it is."""
    # By bits: the conversion of one number is an instruction of a slow unit, and these are exact anyway.
    if INTERPRETED:
        return x
    else:
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def thirds(x):
    """Return three bfloat16 numbers that add up to float32 ``x``, the largest first; in the interpreter float32."""
    first = _leading(x)
    rest = x - first
    second = _leading(rest)
    return _narrow(first), _narrow(second), _narrow(rest - second)


@triton.jit
def stored_factor(x, dtype):
    """Return float32 ``x`` as a factor of ``product_of_factor`` that is stored in ``dtype``: float32, or int32 for a
    pair of bfloat16 numbers, the larger one in the upper half. The sum of a pair is off by 2^-17 of ``x`` at most. A
    NaN may become 0: whatever makes one of T or P is in k, q or the decays too, which pass it on.
    """
    if dtype == tl.int32:
        first = (x.to(tl.int32, bitcast=True) + 0x8000) & -65536
        rest = x - first.to(tl.float32, bitcast=True)
        second = rest.to(tl.uint32, bitcast=True) + 0x8000
        return first | (second >> 16).to(tl.int32, bitcast=True)
    else:
        return x


@triton.jit
def _exact(a, b):
    """Return a @ b of two 16-bit tensors of one dtype, float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _beside(a, b):
    """Return [rows, 2 x columns]: the columns of ``a``, then those of ``b``."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _sum_of_sides(x, COLUMNS: tl.constexpr):
    """Return [rows, COLUMNS]: the right half of the columns plus the left half."""
    left, right = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, COLUMNS)), (0, 2, 1)))
    return right + left


@triton.jit
def product_of_thirds(a, b, SIDES: tl.constexpr):
    """Return a @ b, ``a`` in its stored dtype, ``b`` float32 [K, columns]. ``SIDES``: two parts side by side."""
    if a.dtype != tl.bfloat16:
        return product(a.to(tl.float32), b)
    else:
        b1, b2, b3 = thirds(b)
        if SIDES:
            return _exact(a, b3) + _sum_of_sides(_exact(a, _beside(b1, b2)), b.shape[1])
        else:
            return (_exact(a, b3) + _exact(a, b2)) + _exact(a, b1)


@triton.jit
def product_of_factor(a, b, SIDES: tl.constexpr):
    """Return a @ b with ``a`` of ``stored_factor``, ``b`` float32 [K, columns]; ``SIDES`` as above."""
    if a.dtype != tl.int32:
        return product(a, b)
    else:
        a1 = _narrow((a & -65536).to(tl.float32, bitcast=True))
        a2 = _narrow((a << 16).to(tl.float32, bitcast=True))
        b1, b2, b3 = thirds(b)
        if SIDES:
            sides = _beside(b1, b2)
            return _exact(a1, b3) + _sum_of_sides(_exact(a2, sides) + _exact(a1, sides), b.shape[1])
        else:
            return ((_exact(a1, b3) + _exact(a2, b2)) + (_exact(a2, b1) + _exact(a1, b2))) + _exact(a1, b1)


@triton.jit
def halves(x):
    """Return two float16 numbers that add up to float32 ``x``, off by 2^-22 of it, or by 2^-25 if it is small."""
    first = x.to(tl.float16)
    return first, (x - first.to(tl.float32)).to(tl.float16)


@triton.jit
def product_of_halves(a1, a2, b1, b2):
    """Return a @ b of two tensors of ``halves``, less the smallest of the four products."""
    return (_exact(a2, b1) + _exact(a1, b2)) + _exact(a1, b1)


@triton.jit
def product_right(a, b):
    """Return a @ b, ``b`` in its stored dtype, ``a`` float32."""
    if INTERPRETED or b.dtype != tl.bfloat16:
        return product(a, b.to(tl.float32))
    else:
        a1, a2, a3 = thirds(a)
        return tl.dot(a1, b, tl.dot(a2, b, tl.dot(a3, b)))


@triton.jit
def decay_of(log_decay):
    """Return exp in float32, clamped above the denormals."""
    return tl.exp(tl.maximum(log_decay.to(tl.float32), LOG_DECAY_MIN))


@triton.jit
def decay_sums(log_decay):
    """Return (whole, rest), two float32 parts of the sums along axis 0. There are at most 64 terms, none above 0."""
    # A decay below -80 is clamped anyway, so the floor changes nothing.
    each = tl.maximum(log_decay.to(tl.float32), LOG_DECAY_FLOOR)
    whole = (each + _TO_UNITS) - _TO_UNITS
    return tl.cumsum(whole, axis=0), tl.cumsum(each - whole, axis=0)


@triton.jit
def pairwise_decay(whole, rest, place):
    """Return [i, j] = exp(sums_i - sums_j) for j <= i, else 0; sums as by ``decay_sums``."""
    # The select precedes the exponential: for j > i the difference is positive and unbounded.
    seen = place[:, None] >= place[None, :]
    between = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
    return tl.where(seen, decay_of(tl.where(seen, between, 0.0)), 0.0)


@triton.jit
def decay_to_end(whole, rest, place, PLACES: tl.constexpr):
    """Return (exp(last - sums_i), exp(last)); ``last``: the sum at the last place."""
    last_whole = tl.sum(tl.where(place == PLACES - 1, whole, 0.0))
    last_rest = tl.sum(tl.where(place == PLACES - 1, rest, 0.0))
    return decay_of((last_whole - whole) + (last_rest - rest)), decay_of(last_whole + last_rest)


@triton.jit
def unit_scale(x):
    """Return [rows]: the factors that turn rows of a float32 tile into unit vectors (eps 1e-6)."""
    return tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)


@triton.jit
def exp_of_negative(x):
    """Return e^x for x <= 0, with relative error 3e-7 (2^-22 is the hardware's own); 0 below -87."""
    # The hardware's exponential is to base 2. ``tl.exp`` rounds x log2(e) first: off by 4e-6 at x = -60. So the
    # integer powers of 2 are separated: ln 2 = 355 / 512 - 2.1e-4, and whole x 355 / 512 is exact.
    inside = tl.where(x < -87.0, 0.0, x)
    shifted = inside * 1.4426950408889634 + 12582912.0
    whole = shifted - 12582912.0
    rest = (inside - whole * 0.693359375) + whole * 2.12194440e-4
    # ``shifted`` is 1.5 x 2^23 + ``whole``: its lowest bits are the exponent.
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, tl.exp(rest) * power)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x), with relative error 6e-7, far below 0 too; ``tl.sigmoid`` has 4e-6 at x = -60."""
    e = exp_of_negative(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), with relative error 8e-7: 3e-7 of the exponential, 2.4e-7 of the division, roundings."""
    # With s = e / (2 + e), log(1 + e) = 2 atanh(s), and s <= 1/3. The hardware's logarithm has an absolute
    # error of 1e-7, too large for a step size of 1e-6.
    e = exp_of_negative(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    tail = 1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13 + t / 15)))
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + t * (1 / 3 + t * (1 / 5 + t * tail)))


@triton.jit
def unit_lower_inverse(a, SIZE: tl.constexpr):
    """Return (1 + strictly lower part of a)^-1, float32 [SIZE, SIZE], SIZE = 16 x a power of 2.

    Substitution inverts the diagonal blocks of 8 all at once, row after row, as [blocks, 8, 8]. Then halves are
    combined: D^-1 - D^-1 B D^-1, with D the blocks so far and B the corner between two of them. These are products of
    whole tiles, mostly zeros, and still cheaper than anything without tensor cores. Their factors are pairs of float16,
    with as many bits as tf32x3 and half its work. No number of ``a`` or of the inverse may be near float16's largest;
    in a delta rule none is above 2, as keys have length 1, and beta is at most 2.
    """
    BLOCKS: tl.constexpr = SIZE // BASE
    row = tl.arange(0, SIZE)
    rows, cols = row[:, None], row[None, :]
    a = tl.where(rows > cols, a, 0.0)
    block = tl.arange(0, BLOCKS)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    tiles = tl.sum(tl.where(same, tl.reshape(a, (BLOCKS, BASE, BLOCKS, BASE)), 0.0), axis=2)
    index = tl.arange(0, BASE)
    in_row, in_col = index[None, :, None], index[None, None, :]
    solved = tl.where(in_row == in_col, 1.0, tl.zeros((BLOCKS, BASE, BASE), tl.float32))
    for i in range(1, BASE):
        line = tl.sum(tl.where(in_row == i, tiles, 0.0), axis=1)
        solved_row = -tl.sum(line[:, :, None] * solved, axis=1)
        solved = tl.where((in_row == i) & (in_col < i), solved_row[:, None, :], solved)
    inverse = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), (SIZE, SIZE))
    half = BASE
    while half < SIZE:
        between = (rows // (2 * half) == cols // (2 * half)) & (rows // half != cols // half)
        a1, a2 = halves(tl.where(between, a, 0.0))
        inverse1, inverse2 = halves(inverse)
        corner1, corner2 = halves(product_of_halves(a1, a2, inverse1, inverse2))
        inverse -= product_of_halves(inverse1, inverse2, corner1, corner2)
        half *= 2
    return inverse


_POSITION, _LAYER = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA77)
_FIRST, _SECOND = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
_HALF_LEAST = tl.constexpr(2.0**-14)
_BF16_LARGEST = tl.constexpr(float.fromhex("0x1.fep127"))


@triton.jit
def _mixed(x):
    """Return the hash lowbias32 of uint32, products wrapping."""
    x = (x ^ (x >> 16)) * tl.full((), _FIRST, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), _SECOND, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def rounded(x, dtype, element, position, layer):
    """Return float32 ``x`` rounded to a number of ``dtype``, still float32: the state after the token at ``position``.
    ``element``: int32 index of each number in the layer's state.
    """
    if dtype == tl.float32:
        return x
    else:
        key = _mixed(
            position.to(tl.uint32) * tl.full((), _POSITION, tl.uint32)
            + layer.to(tl.uint32) * tl.full((), _LAYER, tl.uint32)
        )
        bits = _mixed(element.to(tl.uint32) + key)
        size = tl.abs(x)
        if dtype == tl.float16:
            small = size < _HALF_LEAST
            wide = tl.where(small, size + _HALF_LEAST, size).to(tl.uint32, bitcast=True)
            stored = ((wide + (bits & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
            stored = tl.minimum(tl.where(small, stored - _HALF_LEAST, stored), 65504.0)
        else:
            wide = size.to(tl.uint32, bitcast=True)
            stored = ((wide + (bits & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
            stored = tl.minimum(stored, _BF16_LARGEST)
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000
        signed = (stored.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        return tl.where(x != x, x, signed)


COLUMNS_MIN = 512
"""Fewest columns of a split, so that it reads more bytes of the weight than it writes of sums."""


@dataclass(frozen=True, slots=True)
class ColumnSplits:
    """Splits of columns. ``depth``: columns of a split, a number of complete blocks."""

    count: int
    depth: int


def column_splits(columns: int, block: int, *, programs: int, wanted: int) -> ColumnSplits:
    """Return the splits. ``programs``: number without splits; ``wanted``: how many should run."""
    # Only from the weight's shape and the tiles: the bits of a row do not depend on other rows.
    count = max(1, min(wanted // programs, columns // COLUMNS_MIN))
    depth = -(-columns // (count * block)) * block
    return ColumnSplits(-(-columns // depth), depth)


@triton.jit
def sum_of_splits(partials, split_stride, offsets, mask, SPLITS: tl.constexpr):
    """Return float32, of the shape of ``offsets``: the partial sums there, the first split first."""
    total = tl.load(partials + offsets, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * split_stride + offsets, mask=mask, other=0.0)
    return total
