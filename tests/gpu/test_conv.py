"""causal_conv and short_conv in Triton, against the twin that shifts a window token by token."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.steps import on_device, strided_on
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, span, tokens_in
from tests.support.naive_ops import causal_conv as naive_causal_conv
from weft.tensor.inputs import Runs, TapPoint
from weft.tensor.ops.conv import causal_conv, short_conv

CHANNELS = 70
NAN = float("nan")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def windows(slots: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Slots with gaps between them, as in the arena."""
    return noise(slots, 2, CHANNELS, width, seed=3).to(dtype)[:, 1]


def everything(width: int, dtype: torch.dtype) -> tuple[Runs, torch.Tensor]:
    """Decodes, a PAD row, fresh and continued runs shorter and longer than the window; taps inside the first
    tokens, on the grid and at the end; NaN in every slot that may not be read."""
    runs = make_runs(
        [Run(7, slot=3), PAD_ROW, Run(0, slot=8, fresh=True)],
        [Run(40, 90, slot=1), Run(0, 63, slot=2, fresh=True), Run(64, 1, slot=4), Run(0, 2)],
        taps=(TapPoint(3, 1, 5), TapPoint(3, 24, 6), TapPoint(3, 90, 7), TapPoint(4, 2, 9)),
    )
    held = windows(12, width, dtype)
    held[[0, 2, 5, 6, 7, 8, 9, 10, 11]] = NAN
    return runs, held


@DTYPES
@pytest.mark.parametrize(("kernel", "bias", "activation"), [(4, True, "silu"), (2, False, None), (3, False, "silu")])
def test_a_step_of_everything_equals_the_shifted_window(
    dtype: torch.dtype, kernel: int, bias: bool, activation: str | None, device: torch.device
) -> None:
    runs, held = everything(kernel - 1, dtype)
    wider = noise(tokens_in(runs), CHANNELS + 9, seed=1).to(dtype)
    x = wider[:, 4 : 4 + CHANNELS]
    weight = noise(CHANNELS, kernel, seed=2).to(dtype)
    offset = noise(CHANNELS, seed=4).to(dtype) if bias else None
    want_held = held.clone()
    want = naive_causal_conv(x, weight, offset, activation, want_held, runs)
    got_held = strided_on(held, device)
    got = causal_conv(
        x.to(device),
        weight.to(device),
        None if offset is None else offset.to(device),
        activation,
        got_held,
        on_device(runs, device),
    )
    torch.testing.assert_close(got.cpu(), want, **close(dtype))
    assert torch.equal(got_held.cpu().nan_to_num(99.0), want_held.nan_to_num(99.0))
    assert not torch.equal(want_held.nan_to_num(99.0), held.nan_to_num(99.0))  # the control: windows do move

    stale = make_runs([Run(7, slot=3), Run(5, slot=8)], [])  # the control: what is not fresh is read
    made = causal_conv(x[:2].to(device), weight.to(device), None, None, got_held.fill_(NAN), on_device(stale, device))
    assert made.isnan().all()


def test_a_run_in_pieces_of_any_length_is_the_same_to_the_last_bit(device: torch.device) -> None:
    x, weight = noise(70, CHANNELS, seed=1).to(device), noise(CHANNELS, 4, seed=2).to(device)
    held = strided_on(windows(2, 3, torch.float32), device)
    whole_held, pieces = held.clone(), []
    whole = causal_conv(
        x, weight, None, "silu", whole_held, on_device(make_runs([], [Run(0, 70, slot=1, fresh=True)]), device)
    )
    for begin, end in ((0, 1), (1, 3), (3, 68), (68, 70)):
        run = Run(begin, end - begin, slot=1, fresh=begin == 0)
        runs = make_runs([run], []) if end - begin == 1 else make_runs([], [run])
        pieces.append(causal_conv(x[begin:end], weight, None, "silu", held, on_device(runs, device)))
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(held, whole_held)
    assert not torch.equal(pieces[2], pieces[2].flip(0))  # the control: the tokens differ


@DTYPES
def test_a_short_convolution_is_gated_on_both_sides(dtype: torch.dtype, device: torch.device) -> None:
    runs, held = everything(2, dtype)
    made = noise(tokens_in(runs), 3 * CHANNELS, seed=1).to(dtype)
    weight, bias = noise(CHANNELS, 3, seed=2).to(dtype), noise(CHANNELS, seed=4).to(dtype)
    b, c, x = (part.float() for part in made.chunk(3, dim=-1))
    want_held = held.clone()
    gated = (b * x).to(dtype)
    want = c * naive_causal_conv(gated, weight, bias, None, want_held, runs).float()
    got_held = strided_on(held, device)
    got = short_conv(made.to(device), weight.to(device), bias.to(device), got_held, on_device(runs, device))
    rounded_thrice = {"rtol": 4 * close(dtype)["rtol"], "atol": 0.1 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(got.cpu().float(), want, **rounded_thrice)
    torch.testing.assert_close(got_held.cpu(), want_held, equal_nan=True, **close(dtype))
    plain = naive_causal_conv(x, weight, bias, None, held.clone(), runs)
    assert (plain[span(runs, 4)] - want[span(runs, 4)]).abs().max() > 1  # the control: gates do something
