"""How a Triton kernel rounds a state to fewer bits: the same bits as ``tensor.rounding``.

A hash needs no memory in a kernel, and every path computes the same state from the same accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

_POSITION, _LAYER = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA77)
_FIRST, _SECOND = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)
_HALF_LEAST = tl.constexpr(2.0**-14)
_BF16_LARGEST = tl.constexpr(float.fromhex("0x1.fep127"))


@triton.jit
def _mixed(x):
    """lowbias32 of uint32, products wrapping."""
    x = (x ^ (x >> 16)) * tl.full((), _FIRST, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), _SECOND, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def rounded(x, dtype, element, position, layer):
    """float32 ``x`` rounded to what ``dtype`` holds, still float32: the state after the token at
    ``position``. ``element``: int32 index of each number in the layer's state."""
    if dtype == tl.float32:
        return x
    else:
        key = _mixed(position.to(tl.uint32) * tl.full((), _POSITION, tl.uint32)
                     + layer.to(tl.uint32) * tl.full((), _LAYER, tl.uint32))
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
