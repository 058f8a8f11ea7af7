"""Resizing with antialiasing, to the bit as torch resizes 8-bit pictures.

    pixels [h, w, 3] --columns--> 8 bits [h, W, 3] --rows--> 8 bits [H, W, 3]

An output pixel is a weighted sum of the input pixels under its filter, whose width is proportional to the ratio of the
sizes. Weights are whole numbers of 15 to 22 bits, and each of the two passes rounds to 8 bits. These roundings decide
ties: at a ratio of 5 : 4 every fourth pixel is near a tie. Models were trained on torch's results.

A pass is a product with a banded matrix, in blocks of rows, so that each block multiplies few zeros. Sums are
whole numbers that float32 holds exactly, or float64 where weights have more bits.

Source: torch, ``aten/src/ATen/native/cpu/UpSampleKernel.cpp`` (antialiased, uint8); filters are those of Pillow.
Rejected: Pillow's own resize, whose weights have more bits. It is two steps away from torch's at one pixel in 20,000,
after ties in both passes. It is faster, and either takes a hundredth of the encoder's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.images.picture import Pixels

Floats = NDArray[np.float64]
_BLOCK = 32
"""Rows of output that are computed at once."""
_PRECISION_MAX = 22
_EXACT_FLOAT32 = 1 << 24


def resize(rgb: Pixels, width: int, height: int, filter_name: str) -> Pixels:
    """Return ``rgb``, uint8 [height, width, 3], at the new size. ``filter_name``: a name in FILTERS."""
    if rgb.shape[1] != width:
        columns = np.ascontiguousarray(rgb.transpose(1, 0, 2))
        rgb = np.ascontiguousarray(_resized_rows(columns, width, filter_name).transpose(1, 0, 2))
    return rgb if rgb.shape[0] == height else _resized_rows(rgb, height, filter_name)


def fitted(height: int, width: int, grain: int, least: int, most: int, *, smallest: int = 0) -> tuple[int, int]:
    """Return (height, width) in multiples of ``grain``, with ``least`` to ``most`` pixels, and the aspect ratio as
    near as possible. ``smallest``: least length of a side, applied before pixels are counted. Source: ``smart_resize``
    of transformers' ``qwen2_vl`` and ``lfm2_vl``.
    """
    near_height = max(smallest, round(height / grain) * grain)
    near_width = max(smallest, round(width / grain) * grain)
    if near_height * near_width > most:
        shrink = math.sqrt((height * width) / most)
        return (
            max(grain, math.floor(height / shrink / grain) * grain),
            max(grain, math.floor(width / shrink / grain) * grain),
        )
    if near_height * near_width < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / grain) * grain, math.ceil(width * grow / grain) * grain
    return near_height, near_width


def _triangle(x: Floats) -> Floats:
    values: Floats = np.maximum(1 - np.abs(x), 0)
    return values


def _cubic(x: Floats) -> Floats:
    """Return Keys' kernel with a = -0.5."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((x - 5) * x + 8) * x * -0.5 + 2
    values: Floats = np.where(x < 1, near, np.where(x < 2, far, 0))
    return values


FILTERS: dict[str, tuple[Callable[[Floats], Floats], float]] = {"bilinear": (_triangle, 1), "bicubic": (_cubic, 2)}
"""Name -> the filter function, and its reach to each side in input pixels."""


def _weights(rows: int, out_rows: int, filter_name: str) -> tuple[NDArray[np.int64], Floats, int]:
    """Return (first input row, weights [out_rows, taps] as whole numbers, number of fraction bits of the weights)."""
    kernel, reach = FILTERS[filter_name]
    scale = rows / out_rows
    support = reach * max(scale, 1.0)
    inverse = 1 / scale if scale >= 1 else 1.0
    taps = math.ceil(support) * 2 + 1
    centers = scale * (np.arange(out_rows) + 0.5)
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centers + support + 0.5).astype(np.int64), rows) - first
    place = np.arange(taps)
    weights = kernel((place + first[:, None] - centers[:, None] + 0.5) * inverse)
    weights = np.where(place < np.clip(count, 0, taps)[:, None], weights, 0.0)
    weights /= weights.sum(1, keepdims=True)
    largest = float(weights.max())
    precision = 0
    while precision < _PRECISION_MAX and int(0.5 + largest * (1 << (precision + 1))) < 1 << 15:
        precision += 1
    scaled = weights * (1 << precision)
    return first, np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)), precision


def _resized_rows(pixels: Pixels, out_rows: int, filter_name: str) -> Pixels:
    """Return ``pixels`` [rows, a, b] resized to [out_rows, a, b]."""
    rows = pixels.shape[0]
    first, weights, precision = _weights(rows, out_rows, filter_name)
    half = float(1 << precision >> 1)
    largest = 255 * float(np.abs(weights).sum(1).max()) + half
    dtype: Any = np.float32 if largest < _EXACT_FLOAT32 else np.float64
    flat = pixels.reshape(rows, -1)
    out = np.empty((out_rows, flat.shape[1]), np.uint8)
    for start in range(0, out_rows, _BLOCK):
        end = min(start + _BLOCK, out_rows)
        low = int(first[start])
        high = min(int(first[end - 1]) + weights.shape[1], rows)
        band = np.zeros((end - start, high - low), dtype)
        for row in range(start, end):
            left = int(first[row]) - low
            seen = min(weights.shape[1], high - low - left)
            band[row - start, left : left + seen] = weights[row, :seen]
        sums = band @ flat[low:high].astype(dtype)
        sums += half
        sums *= 1 / (1 << precision)
        np.floor(sums, out=sums)
        np.clip(sums, 0, 255, out=sums)
        out[start:end] = sums
    return out.reshape(out_rows, *pixels.shape[1:])
