"""Products of 16-bit numbers with float32 ones: all bits of the float32 side count, parts side by side or not."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from weft.tensor.gpu.products import product_of_factor, product_of_thirds, stored_factor
from weft.tensor.kernels.delta_rule import chunk_blocks

ROWS, DEPTH, COLUMNS = 64, 32, 16
BOUND = 2.0**-20
"""Relative, of sums of positive numbers. Each part of a factor that is left out is an error of 2^-18 or more."""


@triton.jit
def _products(
    x, b, stored, of_thirds, of_factor, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, SIDES: tl.constexpr
):
    row, depth, column = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    left, right = tl.load(x + row * K + depth[None, :]), tl.load(b + depth[:, None] * N + column)
    factor = stored_factor(left, stored.dtype.element_ty)
    tl.store(stored + row * K + depth[None, :], factor)
    tl.store(of_thirds + row * N + column, product_of_thirds(left.to(tl.bfloat16), right, SIDES))
    tl.store(of_factor + row * N + column, product_of_factor(factor, right, SIDES))


@pytest.mark.parametrize("capability", [80, 90])
def test_a_product_of_parts_has_all_bits_of_its_float32_side(capability: int, device: torch.device) -> None:
    """In the form of that GPU: an H100 has two parts side by side, an A100 has not."""
    _, sides = chunk_blocks(torch.bfloat16, by_line=False, capability=capability)
    assert sides == (capability == 90)
    noise = torch.Generator().manual_seed(2)
    short = (1 + torch.rand(ROWS, DEPTH, generator=noise)).bfloat16().float()
    x = short * (1 + 2.0**-9 * (0.3 + 0.6 * torch.rand(ROWS, DEPTH, generator=noise)))
    b = 1 + torch.rand(DEPTH, COLUMNS, generator=noise)
    stored = torch.empty((ROWS, DEPTH), dtype=torch.int32, device=device)
    made = [torch.empty((ROWS, COLUMNS), device=device) for _ in range(2)]
    _products[(1,)](x.to(device), b.to(device), stored, *made, M=ROWS, K=DEPTH, N=COLUMNS, SIDES=sides)

    codes = stored.cpu()
    pair = (codes & -65536).view(torch.float32).double() + (codes << 16).view(torch.float32).double()
    assert ((pair - x.double()).abs() <= 2.0**-17 * x).all()
    for factor, got in zip((short.double(), pair), made, strict=True):
        want = factor @ b.double()
        assert ((got.cpu().double() - want).abs() <= BOUND * want).all()
