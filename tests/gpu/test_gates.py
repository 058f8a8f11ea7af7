"""delta_gates and add_gated in Triton, each against torch's operators."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.tolerances import close
from weft.tensor.ops.delta_rule import delta_gates
from weft.tensor.ops.moe import add_gated

HEADS, TOKENS = 6, 5


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lines", [1, 200])
def test_gates_of_strided_rows_equal_their_formula(dtype: torch.dtype, lines: int, device: torch.device) -> None:
    columns = HEADS * lines
    wide = (noise(TOKENS, columns + HEADS + 3) * 30).to(device, dtype)  # beyond both bends of softplus
    a, b = wide[:, 3 : 3 + columns], wide[:, 3 + columns :]
    bias, decay = noise(columns, seed=4).to(device), -noise(HEADS, seed=5).exp().to(device)
    g, beta = delta_gates(a, bias, decay, b, beta_scale=2.0)
    exact_g, exact_beta = delta_gates.torch(a, bias, decay, b, beta_scale=2.0)
    torch.testing.assert_close(g, exact_g, rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(beta, exact_beta, rtol=1e-6, atol=0)
    other = delta_gates(a, bias, decay.flip(0), b)[0]
    assert (other - g).abs().max() > 0.1, "the control: a column has the decay of its own head"
    floored, exact = (op(a, bias, decay, b, floor=-3.0)[0] for op in (delta_gates, delta_gates.torch))
    torch.testing.assert_close(floored, exact, rtol=2e-5, atol=1e-7)
    assert (floored - g).abs().max() > 0.1
    assert floored.min() >= -3.0
    assert floored.max() <= 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gated_sum_equals_its_formula(dtype: torch.dtype, device: torch.device) -> None:
    y, x = (noise(TOKENS, 70, seed=seed).to(device, dtype) for seed in (1, 2))
    gate = noise(TOKENS, 3)[:, 1:2].to(device, dtype)
    out = add_gated(y, x, gate)
    exact = y.float() + torch.sigmoid(gate.float()) * x.float()
    torch.testing.assert_close(out, exact.to(dtype), **close(dtype))
    assert (out - y).abs().max() > 0.1
    assert add_gated(y[:0], x[:0], gate[:0]).shape == (0, 70)
