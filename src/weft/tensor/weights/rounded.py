"""Weights that weft rounds to 8 or 4 bits.

Groups of 128 columns (int8) and 32 (int4), symmetric: docs/quantization.md has the measurements.
"""

from __future__ import annotations

import torch

from weft.tensor.few_bits import quotient
from weft.tensor.weights.quantized import ZERO_POINT, Codes

GROUPS: dict[int, int] = {8: 128, 4: 32}
"""Bits -> columns per scale, for weights that weft rounds."""
_HALF_MAX = 65504.0
_REACHES = (7.5, 8.0, 8.5, 9.0, 10.0)
"""Candidates in int4 for the steps from zero to a group's largest weight, which saturates beyond 8."""
_ROUNDED_ELEMENTS = 1 << 18
"""Elements rounded at once, so that the temporaries stay in the cache."""


def rounded(weight: torch.Tensor, bits: int) -> Codes:
    """Return ``weight`` [..., rows, columns] of any float dtype, rounded to ``bits``: symmetric, with scales that fit
    float16.

    int8: a scale maps the largest weight of its group to 127. int4: the largest, with its sign, becomes -8;
    then the scale of least squared error is chosen among a few smaller ones.
    """
    group = GROUPS[bits]
    columns = weight.shape[-1]
    if weight.is_meta:
        scales = weight.new_empty((*weight.shape[:-1], -(-columns // group)), dtype=torch.float32)
        return Codes(bits, weight.to(torch.uint8), scales, None, group)
    codes = weight.new_empty((*weight.shape[:-1], -(-columns // group) * group), dtype=torch.uint8)
    groups, scales = codes.view(-1, group), weight.new_empty(codes.numel() // group, dtype=torch.float32)
    padded = torch.nn.functional.pad(weight, (0, -(-columns // group) * group - columns)).view(-1, group)
    step = _ROUNDED_ELEMENTS // group
    for first in range(0, padded.shape[0], step):
        rows = slice(first, first + step)
        part = padded[rows].float()
        scale = _scales(part, bits)
        groups[rows] = _steps(part, scale, bits).add_(ZERO_POINT[bits]).to(torch.uint8)
        scales[rows] = scale.squeeze(1)
    return Codes(bits, codes[..., :columns], scales.view(*weight.shape[:-1], -1), None, group)


def _scales(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scales of groups [n, columns]: float32 [n, 1], each representable in float16."""
    if bits == 8:
        return _stored(quotient(groups.abs().amax(1, keepdim=True), 127.0))
    most = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    least = torch.full_like(most, torch.inf)
    scales = torch.zeros_like(most)
    # A group's largest weight is an outlier more often than not: a smaller scale may err less.
    for reach in _REACHES:
        tried = _stored(quotient(most, -reach))
        error = _steps(groups, tried, 4).mul_(tried).sub_(groups)
        error = torch.linalg.vecdot(error, error).unsqueeze(1)
        scales = torch.where(error < least, tried, scales)
        least = torch.minimum(error, least)
    return scales


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales rounded to float16."""
    return scales.clamp(-_HALF_MAX, _HALF_MAX).half().float()


def _steps(groups: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the steps of the scale from zero, as floats; 0 where the scale is 0."""
    # By the inverse, not by division: these codes are in checkpoints and caches.
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (groups * inverse).round_().clamp_(-8 if bits == 4 else -127, 7 if bits == 4 else 127)
