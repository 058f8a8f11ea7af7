"""States that a gate forgets: no denormal number is left in them, on any path. The process keeps its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.batches import Run, make_runs
from tests.ops.test_native import in_each_set
from tests.support import native_ops
from weft.tensor import native
from weft.tensor.inputs import Runs

HEADS, DIM, TOKENS = 2, 32, 2
DECAYS = (-42.0, -43.5)  # after two of them a state near 1e-3 is denormal in float32


@pytest.fixture(autouse=True)
def native_kernels(torch_kernels: None) -> None:
    native.choose("native")


def tokens(count: int, *parts: int) -> torch.Tensor:
    """Inputs that add nothing to a state: what is left of it is decay alone."""
    return torch.zeros(count, *parts)


def mamba2(state: torch.Tensor, runs: Runs, count: int) -> None:
    native_ops.mamba2(
        tokens(count, HEADS, DIM),
        tokens(count, HEADS),
        torch.tensor(DECAYS),
        tokens(count, 1, DIM),
        tokens(count, 1, DIM),
        torch.ones(HEADS),
        torch.full((HEADS,), 0.5413249),
        state,
        runs,
        dt_limit=(0.0, float("inf")),
    )


def mamba1(state: torch.Tensor, runs: Runs, count: int) -> None:
    channels = HEADS * DIM
    native_ops.mamba1(
        tokens(count, channels),
        tokens(count, channels),
        torch.tensor(DECAYS).repeat_interleave(DIM)[:, None].expand(channels, DIM),
        tokens(count, DIM),
        tokens(count, DIM),
        torch.ones(channels),
        torch.full((channels,), 0.5413249),
        state.view(2, channels, DIM),
        runs,
    )


def delta(state: torch.Tensor, runs: Runs, count: int, lines: bool = False) -> None:
    decays = torch.tensor(DECAYS).expand(count, HEADS)
    native_ops.delta_rule(
        tokens(count, HEADS, DIM),
        tokens(count, HEADS, DIM),
        tokens(count, HEADS, DIM),
        decays[:, :, None].repeat(1, 1, DIM) if lines else decays,
        tokens(count, HEADS),
        state,
        runs,
        scale=1.0,
    )


def kimi(state: torch.Tensor, runs: Runs, count: int) -> None:
    delta(state, runs, count, lines=True)


def before() -> torch.Tensor:
    return torch.linspace(1e-5, 1e-2, 2 * HEADS * DIM * DIM).view(2, HEADS, DIM, DIM).clone()


def is_denormal(x: torch.Tensor) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32) & 0x7FFFFFFF
    return (bits > 0) & (bits < 0x00800000)


@pytest.mark.parametrize("op", [mamba2, mamba1, delta, kimi])
@pytest.mark.parametrize("prompt", [False, True])
def test_a_forgotten_state_holds_no_denormal_number(op: object, prompt: bool) -> None:
    assert callable(op)

    def forgotten() -> tuple[torch.Tensor]:
        state = before()
        if prompt:
            op(state, make_runs([], [Run(5, TOKENS, slot=1)]), TOKENS)
        else:
            for at in range(TOKENS):
                op(state, make_runs([Run(5 + at, slot=1)], []), 1)
        return (state,)

    control = before()[1] * torch.tensor(DECAYS).mul(TOKENS).exp()[:, None, None]
    assert is_denormal(control).any(), "the decays of this test leave no denormal number anywhere"
    for (state,) in in_each_set(forgotten):
        assert torch.equal(state[0], before()[0])
        assert not is_denormal(state[1]).any()
        assert state[1].abs().max() < 1e-30


def test_the_thread_keeps_its_denormal_numbers() -> None:
    state = before()
    mamba2(state, make_runs([Run(5, slot=1)], []), 1)
    assert native.extension().instruction_set()
    assert np.float32(1e-30) * np.float32(1e-10) > 0
    assert (torch.full((64,), 1e-30) * 1e-10 > 0).all()
