"""Sums of log decays in two float32 numbers: differences err by at most 2^-23, whatever the terms."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from weft.tensor.gpu.products import decay_sums
from weft.tensor.kernels.mamba1 import added

PLACES = 64
BOUND = 2.0**-23


@triton.jit
def _sums(log_decay, whole_out, rest_out, N: tl.constexpr):
    at = tl.arange(0, N)
    whole, rest = decay_sums(tl.load(log_decay + at))
    tl.store(whole_out + at, whole)
    tl.store(rest_out + at, rest)


def sums_of(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole, rest = torch.empty_like(log_decay), torch.empty_like(log_decay)
    _sums[(1,)](log_decay, whole, rest, N=PLACES)
    return whole.cpu(), rest.cpu()


def differences(sums: torch.Tensor) -> torch.Tensor:
    return sums[:, None] - sums[None, :]


TERMS = {
    "like a model's": lambda g: -torch.rand(PLACES, generator=g).mul(3).exp(),
    "large, then tiny": lambda g: torch.where(torch.arange(PLACES) < 8, -127.99, -1e-4 / 3),
    "tiny": lambda g: -torch.rand(PLACES, generator=g) * 1e-9,
    "all of them between two multiples": lambda g: torch.full((PLACES,), -5 - 0.999 * 2.0**-11),
    "beyond the clamp": lambda g: torch.where(torch.arange(PLACES) % 9 == 4, -1e30, -0.3),
    "infinite": lambda g: torch.where(torch.arange(PLACES) == 5, -torch.inf, -0.3),
}


@pytest.mark.parametrize("name", TERMS)
def test_differences_of_sums_are_exact_to_two_to_the_minus_23(name: str, device: torch.device) -> None:
    terms = TERMS[name](torch.Generator().manual_seed(3)).float()
    whole, rest = sums_of(terms.to(device))
    exact = terms.double().clamp(min=-128).cumsum(0)
    close = (differences(whole).double() + differences(rest).double() - differences(exact)).abs().max()
    assert float(close) <= BOUND
    assert torch.equal(whole * 1024, (whole * 1024).round()), "whole sums are multiples of 2^-10"
    assert float(rest.abs().max()) <= 2.0**-5


def test_the_control_one_float32_sum_misses_the_bound() -> None:
    terms = TERMS["large, then tiny"](torch.Generator()).float()
    exact = differences(terms.double().cumsum(0))
    assert float((differences(terms.cumsum(0)).double() - exact).abs().max()) > 4 * BOUND


@triton.jit
def _sum(terms, out, N: tl.constexpr):
    total, rest = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    for index in range(N):
        total, rest = added(total, rest, tl.load(terms + index + tl.arange(0, 1)))
    tl.store(out + tl.arange(0, 1), total + rest)


@pytest.mark.parametrize("first", [3e7, 0.0, 1e-9])
def test_a_sum_of_step_sizes_is_the_one_in_float64_rounded_once(first: float, device: torch.device) -> None:
    terms = torch.rand(PLACES, generator=torch.Generator().manual_seed(5))
    terms[0] = first
    out = torch.empty(1, device=device)
    _sum[(1,)](terms.to(device), out, N=PLACES)
    assert out.cpu().tolist() == [float(terms.double().sum().float())]
    if first > 1:  # the control
        plain = torch.zeros(())
        for term in terms:
            plain = plain + term
        assert float(plain) != float(out)
