"""Values -> blocks of Q4_K and Q8_0: the other direction of ``gguf_blocks``.

    Q4_K    256 columns in 144 bytes    value = d sc[g] code - dmin m[g]      g: a group of 32 columns
            d, dmin float16; sc, m six bits; codes of four
    Q8_0    gguf's own packer

A group's scale and minimum come from least squares over several candidate ranges of its codes; then they are rounded to
six bits of the block's largest, and the codes are chosen again. Nothing is calibrated: all columns have equal weight.

Source: the block structures of ggml (``ggml-common.h``).
"""

from __future__ import annotations

import numpy as np
import torch

from weft.tensor.weights.quantized import BLOCK, LINE

_GROUPS = BLOCK // LINE
_MOST, _STEPS = 63, 15
_SPANS = (15.0, 14.3, 13.6, 15.8)
"""Candidate numbers of steps between a group's smallest and largest number; above 15 both ends saturate."""
_LEAST = 1e-30
_TOGETHER = 512
"""Blocks at once, so that the temporaries stay in the cache."""


def q4_k(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (blocks uint8 [R, bytes], their values [R, columns]) of ``rows``, float32 [R, columns], complete
    blocks."""
    groups = rows.reshape(-1, _GROUPS, LINE)
    parts = [_q4_k(groups[start : start + _TOGETHER]) for start in range(0, len(groups), _TOGETHER)]
    blocks, values = (torch.cat(each) for each in zip(*parts, strict=True))
    return blocks.reshape(rows.shape[0], -1), values.reshape(rows.shape)


def _q4_k(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and values of groups [N, 8, 32]."""
    scales, minimums = _ranges(groups)
    d = (scales.amax(1, keepdim=True) / _MOST).half()
    d_min = (minimums.amax(1, keepdim=True) / _MOST).half()
    sixth_scales = _sixth(scales, d.float())
    sixth_minimums = _sixth(minimums, d_min.float())
    scales, minimums = d.float() * sixth_scales, d_min.float() * sixth_minimums
    codes = _codes(groups, scales, minimums)
    values = codes * scales.unsqueeze(2) - minimums.unsqueeze(2)
    blocks = torch.cat(
        (
            d.view(torch.uint8),
            d_min.view(torch.uint8),
            _twelve_bytes(sixth_scales.to(torch.uint8), sixth_minimums.to(torch.uint8)),
            _nibbles(codes.to(torch.uint8)),
        ),
        dim=1,
    )
    return blocks, values


def q8_0(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (blocks uint8 [R, bytes], their values) of ``rows``, float32 [R, columns], complete lines of 32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    blocks = quantize(np.ascontiguousarray(rows.numpy()), GGMLQuantizationType.Q8_0)
    return torch.from_numpy(blocks), torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q8_0))


def _ranges(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums, both at least 0, of groups [N, 8, 32]: float32 [N, 8]."""
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    scales, minimums = torch.zeros_like(low), torch.zeros_like(low)
    total, squares = groups.sum(2), torch.linalg.vecdot(groups, groups)
    for span in _SPANS:
        codes = _codes(groups, (high - low) / span, -low)
        # Least squares of scale x code - minimum, by sums; without a minimum where it would be negative.
        count, each = codes.sum(2), torch.linalg.vecdot(codes, codes)
        both = torch.linalg.vecdot(codes, groups)
        scale = (LINE * both - count * total) / (LINE * each - count * count).clamp(min=_LEAST)
        minimum = (scale * count - total) / LINE
        alone = (minimum < 0) | (scale <= 0) | (LINE * each == count * count)
        scale = torch.where(alone, (both / each.clamp(min=1)).clamp(min=0), scale)
        minimum = torch.where(alone, 0.0, minimum)
        error = (
            squares
            + scale * scale * each
            + LINE * minimum * minimum
            - 2 * (scale * both + scale * minimum * count - minimum * total)
        )
        # All equal and below zero: no code, only the minimum.
        flat = alone & (total < 0) & (squares - total * total / LINE < error)
        error = torch.where(flat, squares - total * total / LINE, error)
        scale, minimum = torch.where(flat, 0.0, scale), torch.where(flat, -total / LINE, minimum)
        better = error < best
        best = torch.where(better, error, best)
        scales, minimums = torch.where(better, scale, scales), torch.where(better, minimum, minimums)
    return scales, minimums


def _codes(groups: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scales > 0, 1 / scales.clamp(min=_LEAST), 0.0)
    return ((groups + minimums.unsqueeze(2)) * inverse.unsqueeze(2)).round_().clamp_(0, _STEPS)


def _sixth(numbers: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.where(unit > 0, numbers / unit.clamp(min=_LEAST), 0.0).round_().clamp_(0, _MOST)


def _twelve_bytes(scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N, 8] twice -> [N, 12]: for the last four, the upper two bits are above those of the first four."""
    return torch.cat(
        (
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minimums[:, :4] | minimums[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4,
        ),
        dim=1,
    )


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N, 8, 32] -> [N, 128]: a line in the low halves of 32 bytes, the next in their high halves."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).flatten(1)
