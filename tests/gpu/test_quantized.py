"""Products with weights in int8 and int4 in Triton, dense and by experts, against their twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.tolerances import close
from tests.ops.quantised import noise, weight
from weft.tensor.ops.moe import moe
from weft.tensor.ops.moe.naive import moe as naive_moe
from weft.tensor.ops.quantized_linear import naive, quantized_linear
from weft.tensor.weights.quantized import QuantizedWeight
from weft.units import PAD


def on(made: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    return replace(made, codes=made.codes.to(device), scales=made.scales.to(device),
                   zeros=None if made.zeros is None else made.zeros.to(device))


@pytest.mark.parametrize(("bits", "group", "zeros"), [(8, None, False), (4, None, False), (4, 64, True),
                                                      (8, -1, True)])
def test_a_product_equals_that_of_the_widened_weight(bits: int, group: int | None, zeros: bool,
                                                     device: torch.device) -> None:
    """Rows that fill no tile, columns that fill no line, more than one block of both."""
    made = weight(bits, 70, 200, group=group, zeros=zeros)
    bias = noise(5, 70)
    for rows in (1, 19):
        x = noise(rows, rows, 200)
        want = naive.quantized_linear(x, made, bias)
        got = quantized_linear(x.to(device), on(made, device), bias.to(device)).cpu()
        torch.testing.assert_close(got, want, **close(torch.float32))
        plain = quantized_linear(x.to(device).bfloat16(), on(made, device)).cpu()
        assert plain.dtype == torch.bfloat16
        torch.testing.assert_close(plain.float(), want - bias, atol=0.3, rtol=2e-2)
    assert (want - naive.quantized_linear(x, weight(bits, 70, 200, group=group, zeros=zeros, seed=9),
                                          bias)).abs().max() > 1   # the control: other codes, another product


def test_no_row_is_no_product(device: torch.device) -> None:
    made = on(weight(4, 32, 64), device)
    assert quantized_linear(torch.empty(2, 0, 64, device=device), made).shape == (2, 0, 32)


@pytest.mark.parametrize(("bits", "zeros", "gated"), [(8, False, True), (4, True, True), (4, False, False)])
def test_quantised_experts_equal_their_formula(bits: int, zeros: bool, gated: bool,
                                               device: torch.device) -> None:
    tokens, experts, inner, width = 5, 4, 48, 72
    up = weight(bits, experts, (2 if gated else 1) * inner, width, zeros=zeros)
    down = weight(bits, experts, width, inner, zeros=zeros, seed=3)
    x, shares = noise(7, tokens, width), noise(8, tokens, 2).abs()
    ids = torch.tensor([[0, 3], [PAD, 3], [2, PAD], [PAD, PAD], [3, 2]])
    want = naive_moe(x, ids, shares, up.dense(), down.dense(), gated=gated)
    got = moe(x.to(device), ids.to(device), shares.to(device), on(up, device), on(down, device),
              gated=gated).cpu()
    torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)
    assert not got[3].any()
    ids[0, 0] = 1   # the control: another expert, another token
    assert (got[0] - naive_moe(x, ids, shares, up.dense(), down.dense(), gated=gated)[0]).abs().max() > 0.1


def test_one_side_may_be_quantised_alone(device: torch.device) -> None:
    up, down = weight(8, 3, 2 * 32, 40), weight(8, 3, 40, 32, seed=3)
    x, ids, shares = noise(7, 3, 40), torch.tensor([[0], [2], [1]]), torch.ones(3, 1)
    want = naive_moe(x, ids, shares, up.dense(), down.dense())
    for parts in ((up.dense().to(device), on(down, device)), (on(up, device), down.dense().to(device))):
        got = moe(x.to(device), ids.to(device), shares.to(device), *parts).cpu()
        torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)
