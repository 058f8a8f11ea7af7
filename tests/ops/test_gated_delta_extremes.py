"""Inputs at which the chunked delta rules would lose its digits if they were done carelessly."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import Run, make_runs
from tests.support.naive_ops import delta_rule as naive_delta_rule
from weft.tensor.ops.delta_rule import delta_rule, unit_lower_inverse


@pytest.mark.parametrize("decay", [0.0, -1e-4, -5.0, -60.0])
@pytest.mark.parametrize("same_key", [False, True])
@pytest.mark.parametrize("strength", [0.999, 1.6])
def test_strong_and_missing_decay_with_repeated_keys(decay: float, same_key: bool, strength: float) -> None:
    noise = torch.Generator().manual_seed(0)
    tokens = 200
    q, k = torch.randn(2, tokens, 2, 16, generator=noise).unbind(0)
    if same_key:
        k = k[:1].expand(tokens, 2, 16)
    v = torch.randn(tokens, 2, 8, generator=noise)
    g, beta = torch.full((tokens, 2), decay), torch.full((tokens, 2), strength)
    states = torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)
    runs = make_runs([], [Run(0, tokens, slot=0, fresh=True)])
    want = naive_delta_rule(q, k, v, g, beta, states[0], runs, scale=0.25)
    got = delta_rule(q, k, v, g, beta, states[1], runs, scale=0.25)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("same_key", [False, True])
def test_channels_that_forget_at_once_beside_channels_that_never_do(same_key: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    tokens = 200
    q, k = torch.randn(2, tokens, 2, 16, generator=noise).unbind(0)
    if same_key:
        k = k[:1].expand(tokens, 2, 16)
    v = torch.randn(tokens, 2, 8, generator=noise)
    g = torch.tensor([0.0, -1e-4, -5.0, -60.0]).repeat(4).expand(tokens, 2, 16)
    beta = torch.full((tokens, 2), 0.999)
    states = torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8)
    runs = make_runs([], [Run(0, tokens, slot=0, fresh=True)])
    want = naive_delta_rule(q, k, v, g, beta, states[0], runs, scale=0.25)
    got = delta_rule(q, k, v, g, beta, states[1], runs, scale=0.25)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_block_inverse_is_an_inverse(size: int) -> None:
    a = torch.rand(5, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    wanted = torch.linalg.inv(a.double().tril(-1) * 0.3 + torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(unit_lower_inverse(a * 0.3).double(), wanted, rtol=1e-4, atol=1e-5)
