"""Weights in int8 and int4: what rounding does, the order they lie in, and products with them in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.quantised import noise, weight
from tests.support import naive_ops
from weft.models.blocks.linear import Linear
from weft.tensor.ops.linear import JoinedWeight, weight_product
from weft.tensor.weights.quantized import Codes, QuantizedWeight, in_tiles
from weft.tensor.weights.rounded import rounded

CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}


@pytest.mark.parametrize("shape", [(16, 32), (33, 100), (1, 32), (5, 320), (3, 48, 96)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_tiles_hold_the_values_of_the_codes(bits: int, shape: tuple[int, ...], zeros: bool) -> None:
    codes = rounded(noise(1, *shape), bits)
    if zeros:
        own = torch.arange(codes.scales.numel()).view(codes.scales.shape) % (1 << bits)
        codes = Codes(bits, codes.codes, codes.scales, own.to(torch.uint8), codes.group)
    tiles = in_tiles(codes)
    assert torch.equal(tiles.dense(), codes.dense())
    assert (tiles.zeros is not None) == zeros
    if shape[-2] > 16:
        assert torch.equal(tiles.dense(16, 30), codes.dense()[..., 16:30, :])


def test_int8_is_at_most_half_a_step_off_and_int4_keeps_the_largest() -> None:
    x = noise(2, 40, 256)
    codes = rounded(x, 8)
    steps = codes.scales.repeat_interleave(codes.group, dim=1)
    assert bool(((codes.dense() - x).abs() <= 0.5001 * steps).all())
    four = rounded(x, 4)
    assert bool((four.dense() - x).square().mean() < 0.012 * x.square().mean())
    assert four.codes.max() <= 15


def test_a_group_of_zeros_and_a_huge_one_are_finite() -> None:
    x = noise(3, 16, 64)
    x[0] = 0
    x[1] *= 1e8
    x[2] *= 1e-9
    for bits in (8, 4):
        made = in_tiles(rounded(x, bits)).dense()
        assert made.isfinite().all()
        assert bool((made[0] == 0).all())


def test_scales_that_float16_cannot_hold_stay_float32() -> None:
    codes = rounded(noise(4, 16, 64), 8)
    assert in_tiles(codes).scales.dtype == torch.float16
    wide = in_tiles(Codes(8, codes.codes, codes.scales * 1.0001, None, codes.group))
    assert wide.scales.dtype == torch.float32
    assert torch.equal(QuantizedWeight.stack([wide, in_tiles(codes)])[1].dense(), codes.dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_product_is_the_naive_one(bits: int, rows: int, dtype: torch.dtype) -> None:
    x, bias = noise(5, rows, 100, dtype=dtype), noise(6, 33)
    w = weight(bits, 33, 100, zeros=True)
    truth = naive_ops.quantized_linear(x.float(), w, bias)
    if dtype == torch.bfloat16:  # torch widens to the dtype of x
        truth = x.float() @ w.dense(dtype=dtype).float().T + bias
    torch.testing.assert_close(weight_product(x, w, bias), truth.to(dtype), **CLOSE[dtype])
    assert weight_product(x[None], w).shape == (1, rows, 33)
    assert weight_product(x[:0], w).shape == (0, 33)


def test_a_wide_matrix_goes_in_blocks() -> None:
    w, x = weight(8, 1100, 512), noise(7, 2, 512)
    torch.testing.assert_close(weight_product(x, w), F.linear(x, w.dense()), rtol=2e-5, atol=2e-4)


def test_joined_forms_lie_side_by_side() -> None:
    w, plain, bias = weight(4, 16, 64), noise(12, 5, 64), noise(13, 21)
    x = noise(14, 3, 64)
    want = F.linear(x, torch.cat([w.dense(), plain]), bias)
    torch.testing.assert_close(Linear(JoinedWeight((w, plain)), bias)(x), want, **CLOSE[torch.float32])
