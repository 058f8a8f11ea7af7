"""Weights for the tests of quantised products."""

from __future__ import annotations

import torch

from weft.tensor.weights.quantized import Codes, QuantizedWeight, in_tiles
from weft.tensor.weights.rounded import rounded


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(
    bits: int, *shape: int, zeros: bool = False, exact: bool = False, group: int | None = None, seed: int = 0
) -> QuantizedWeight:
    """Random: [rows, columns], or with experts before. ``zeros``: others in each group. ``group`` -1
    for a scale per row."""
    codes = rounded(noise(seed, *shape), bits)
    if group is not None or zeros:
        generator = torch.Generator().manual_seed(seed + 1)
        width = -(-shape[-1] // 32) * 32 if group == -1 else group or codes.group
        scales = torch.rand(*shape[:-1], -(-shape[-1] // width), generator=generator) + 0.5
        scales /= 1 << bits
        own = torch.randint(0, 1 << bits, scales.shape, generator=generator, dtype=torch.uint8)
        codes = Codes(bits, codes.codes, scales, own if zeros else None, width)
    return in_tiles(codes, exact=exact)


def fp8_weight(*shape: int, high: int = 128, wide: int = 128, seed: int = 0) -> QuantizedWeight:
    """Random, with a scale for each block of ``high`` x ``wide``; the smallest codes are below 2^-6."""
    values = noise(seed, *shape) * torch.logspace(-6, 2, shape[-2])[:, None]
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    generator = torch.Generator().manual_seed(seed + 1)
    blocks = torch.rand(*shape[:-2], -(-shape[-2] // high), -(-shape[-1] // wide), generator=generator) + 0.5
    scales = blocks.repeat_interleave(high, dim=-2)[..., : shape[-2], :]
    return in_tiles(Codes(8, codes, scales, None, wide, fp8=True))
