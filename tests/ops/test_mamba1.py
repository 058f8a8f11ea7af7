"""What mamba1 promises beyond its siblings: the same numbers however a prompt is cut, at any decay."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.models.mamba import modeling_mamba

from tests.ops.batches import Run, make_runs
from tests.support.naive_ops import mamba1 as naive_mamba1
from weft.tensor.inputs import TapPoint
from weft.tensor.ops import mamba1 as scanning
from weft.tensor.ops.mamba1 import mamba1

CHANNELS, WIDTH = 7, 4


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    """x, dt, A, B, C, D, dt_bias."""
    rates = -torch.logspace(-2, 1.2, CHANNELS * WIDTH).view(CHANNELS, WIDTH)
    return (
        noise(tokens, CHANNELS),
        noise(tokens, CHANNELS, seed=1),
        rates,
        noise(tokens, WIDTH, seed=2),
        noise(tokens, WIDTH, seed=3),
        noise(CHANNELS, seed=4),
        noise(CHANNELS, seed=5),
    )


def cut(given: tuple[torch.Tensor, ...], begin: int, end: int) -> tuple[torch.Tensor, ...]:
    x, dt, a, b, c, d, bias = given
    return x[begin:end], dt[begin:end], a, b[begin:end], c[begin:end], d, bias


@pytest.mark.parametrize("cuts", [(64,), (128, 192), (64, 128, 192, 256)])
def test_a_prompt_cut_on_the_grid_gives_the_very_same_numbers(cuts: tuple[int, ...]) -> None:
    given, ends = inputs(300), [0, *cuts, 300]
    whole_state, state = torch.zeros(2, CHANNELS, WIDTH), torch.zeros(2, CHANNELS, WIDTH)
    whole = mamba1(*given, whole_state, make_runs([], [Run(0, 300, slot=0, fresh=True)]))
    pieces = [
        mamba1(*cut(given, begin, end), state, make_runs([], [Run(begin, end - begin, slot=0, fresh=begin == 0)]))
        for begin, end in itertools.pairwise(ends)
    ]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(state[0], whole_state[0])


def test_a_run_from_a_tap_gives_the_very_same_numbers() -> None:
    given, state = inputs(300), torch.zeros(3, CHANNELS, WIDTH)
    whole = mamba1(
        *given, state, make_runs([], [Run(0, 300, slot=0, fresh=True)], taps=(TapPoint(0, 128, 1), TapPoint(0, 256, 2)))
    )
    for slot, begin in ((1, 128), (2, 256)):
        rest = mamba1(*cut(given, begin, 300), state, make_runs([], [Run(begin, 300 - begin, slot=slot)]))
        assert torch.equal(rest, whole[begin:])
        assert torch.equal(state[slot], state[0])


def test_groups_of_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many chunks at once as the cache holds: with real sizes one or two, here all of them."""
    runs = make_runs([], [Run(0, 300, slot=0, fresh=True), Run(70, 200, slot=1)], taps=(TapPoint(1, 90, 2),))
    given = inputs(500)
    one, other = noise(3, CHANNELS, WIDTH), noise(3, CHANNELS, WIDTH)
    together = mamba1(*given, one, runs)
    monkeypatch.setattr(scanning, "STATE_BLOCK_BYTES", 2 * 4 * CHANNELS * WIDTH)
    assert torch.equal(mamba1(*given, other, runs), together)
    assert torch.equal(one, other)


@pytest.mark.parametrize("shift", [-12.0, 6.0, 60.0])
def test_steps_of_any_size_stay_exact(shift: float) -> None:
    """From states that forget nothing in a chunk to ones that are gone after a token."""
    x, dt, a, b, c, d, bias = inputs(200)
    runs = make_runs([Run(9, slot=1)], [Run(40, 199, slot=0)])
    given = (x, dt + shift, a, b, c, d, bias)
    got_state, want_state = noise(2, CHANNELS, WIDTH), noise(2, CHANNELS, WIDTH)
    want, got = naive_mamba1(*given, want_state, runs), mamba1(*given, got_state, runs)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5 * float(want.abs().max()))
    torch.testing.assert_close(got_state, want_state, rtol=2e-5, atol=2e-5)


def test_mamba1_equals_transformers_scan_and_state_update() -> None:
    x, dt, a, b, c, d, bias = inputs(151)
    state, n = torch.full((1, CHANNELS, WIDTH), float("nan")), 150
    want, want_state = modeling_mamba.mamba_selective_scan(
        x[None, :n].mT,
        dt[None, :n].mT,
        a,
        b[None, :n].mT,
        c[None, :n].mT,
        D=d,
        delta_bias=bias,
        delta_softplus=True,
        return_last_state=True,
    )
    got = mamba1(*cut((x, dt, a, b, c, d, bias), 0, n), state, make_runs([], [Run(0, n, slot=0, fresh=True)]))
    torch.testing.assert_close(got, want[0].T, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state, want_state, rtol=2e-5, atol=2e-5)
    want_one = modeling_mamba.mamba_selective_state_update(
        want_state, x[n:], dt[n:], a, b[n:], c[n:], d, dt_bias=bias, dt_softplus=True
    )
    got = mamba1(*cut((x, dt, a, b, c, d, bias), n, n + 1), state, make_runs([Run(n, slot=0)], []))
    torch.testing.assert_close(got, want_one, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state, want_state, rtol=2e-5, atol=2e-5)
