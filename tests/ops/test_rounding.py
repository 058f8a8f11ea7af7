"""States in few bits: rounded at random, by a rule that knows nothing but layer, position and element."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, tokens_in
from tests.ops.recurrent import RECURRENT_OPS, RecurrentOp
from weft.tensor.inputs import TapPoint
from weft.tensor.rounding import rounded, state_key

NARROW = [torch.bfloat16, torch.float16]
each_narrow = pytest.mark.parametrize("dtype", NARROW)
OPS = [op for op in RECURRENT_OPS if op.name in ("gated_delta", "kimi_delta", "mamba1", "mamba2", "wkv7")]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


@each_narrow
def test_a_number_becomes_one_of_its_two_neighbours(dtype: torch.dtype) -> None:
    x = noise(1, 4096) * torch.logspace(-30 if dtype == torch.bfloat16 else -9, 4, 4096)
    stored = rounded(x, dtype, [7], 3)
    assert torch.equal(stored, stored.to(dtype).float()), "the dtype does not hold it"
    near = x.to(dtype)
    step = torch.nextafter(near.abs(), torch.tensor(float("inf"), dtype=dtype)).float() - near.abs().float()
    assert ((stored - x).abs() <= step).all()
    assert torch.equal(rounded(stored, dtype, [8], 3), stored), "a number that the dtype holds is itself"
    assert ((stored > x) & (x != stored)).any()
    assert ((stored < x) & (x != stored)).any()


@each_narrow
def test_the_mean_over_many_positions_is_the_number_itself(dtype: torch.dtype) -> None:
    """Where rounding to nearest would give the same every time."""
    for value in (1.0004, -3.001, 2.0**-18 * 1.3, 100.1):
        x = torch.full((20_000, 1), value)
        mean = float(rounded(x, dtype, range(20_000), 0).mean())
        step = (
            abs(
                float(torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(float("inf"), dtype=dtype)))
                - value
            )
            + 2.0**-24
        )
        assert abs(mean - value) < 0.02 * step + 1e-7 * abs(value)


@each_narrow
def test_what_is_too_large_is_the_largest_and_nan_stays(dtype: torch.dtype) -> None:
    most = float(torch.finfo(dtype).max)
    x = torch.tensor([[most, 3.4e38, -3.4e38, float("inf"), float("nan"), 0.0, -0.0]])
    assert rounded(x, dtype, [1], 1)[0, :4].tolist() == [most, most, -most, most]
    assert rounded(x, dtype, [1], 1)[0, 4].isnan()
    assert rounded(x, dtype, [1], 1)[0, 5:].tolist() == [0.0, 0.0]


def test_the_bits_are_those_of_the_rule() -> None:
    """lowbias32 in plain integers; another rule would make another state of a text that is cached."""

    def mixed(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ x >> 16

    x = 1 + noise(3, 50).abs()
    stored = rounded(x, torch.bfloat16, [0, 5, 70_000], 11)
    for row, position in enumerate((0, 5, 70_000)):
        assert state_key(position, 11) == mixed((position * 0x9E3779B1 + 11 * 0x85EBCA77) & 0xFFFFFFFF)
        for element in range(50):
            bits = mixed((element + state_key(position, 11)) & 0xFFFFFFFF) & 0xFFFF
            expected = (int(x[row, element].view(torch.int32)) + bits) & ~0xFFFF
            assert int(stored[row, element].view(torch.int32)) == expected


def test_rows_layers_and_positions_draw_for_themselves() -> None:
    x = noise(1, 500)
    first = rounded(x, torch.bfloat16, [4], 2)
    assert torch.equal(rounded(x.repeat(3, 1), torch.bfloat16, [9, 4, 1], 2)[1:2], first)
    for position, layer in ((5, 2), (4, 3), (2, 4)):
        assert not torch.equal(rounded(x, torch.bfloat16, [position], layer), first)


MIXED = make_runs(
    [Run(7, slot=3), PAD_ROW, Run(40, slot=0), Run(0, slot=6, fresh=True)],
    [Run(0, 20, slot=1, fresh=True), Run(40, 30, slot=5), Run(0, 3), Run(63, 2, slot=4)],
    taps=(TapPoint(5, 24, 8), TapPoint(5, 30, 9), TapPoint(5, 2, 10)),
)


@each_op
@each_narrow
def test_a_mixed_step_over_narrow_states_equals_the_twin(op: RecurrentOp, dtype: torch.dtype) -> None:
    """Rounded alike but where the two differ in the seventh digit and a border lies between."""
    states = [op.states(11).to(dtype) for _ in range(2)]
    for state in states:
        state[[1, 6, 8, 9, 10]] = float("nan")
    inputs = op.inputs(tokens_in(MIXED), 1)
    got, want = (op.call(which, inputs, state, MIXED) for which, state in zip(("cpu", "naive"), states, strict=True))
    live = [t for t in range(tokens_in(MIXED)) if t != 1]
    torch.testing.assert_close(got[live], want[live], rtol=1e-3, atol=1e-3)
    assert (states[0] == states[1]).float().mean() > 0.99
    torch.testing.assert_close(states[0].float(), states[1].float(), rtol=1e-2, atol=1e-3)
    untouched = op.states(11).to(dtype)
    assert torch.equal(states[0][[2, 7]], untouched[[2, 7]])


@each_op
@each_narrow
@pytest.mark.parametrize("cut", [1, 7, 19])
def test_a_run_in_pieces_and_in_decodes_leaves_the_state_of_the_run_in_one(
    op: RecurrentOp, dtype: torch.dtype, cut: int
) -> None:
    inputs = op.inputs(20, 1)
    part = {name: x[cut:] for name, x in inputs.items()}
    whole, pieces = op.states(2).to(dtype), op.states(2).to(dtype)
    op.call("cpu", inputs, whole, make_runs([], [Run(5, 20, slot=0)]))
    head = {name: x[:cut] for name, x in inputs.items()}
    op.call("cpu", head, pieces, make_runs([], [Run(5, cut, slot=0)]))
    for token in range(20 - cut):
        one = {name: x[token : token + 1] for name, x in part.items()}
        op.call("cpu", one, pieces, make_runs([Run(5 + cut + token, slot=0)], []))
    assert (whole == pieces).float().mean() > 0.98
    torch.testing.assert_close(whole.float(), pieces.float(), rtol=1e-2, atol=1e-3)
    nearest = op.states(2)  # the control: what is rounded otherwise is another state
    op.call("cpu", inputs, nearest, make_runs([], [Run(5, 20, slot=0)]))
    assert (whole == nearest.to(dtype)).float().mean() < 0.9
