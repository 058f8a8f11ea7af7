"""The recurrent ops in Triton: what each promises, against its twin token by token in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.gpu.recurrences import RECURRENCES, RELEASED_MAMBA2, WIDE_MAMBA1, Recurrence
from tests.gpu.steps import on_device
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, span, tokens_in
from weft.families.mixers.delta import GatedDelta
from weft.families.mixers.mamba import Mamba2
from weft.tensor import gpu
from weft.tensor.inputs import TapPoint
from weft.tensor.ops.recurrent_layers import GatedDeltaWeights, Mamba2Weights, gated_delta_layer, mamba2_layer
from weft.tensor.rounding import rounded

each = pytest.mark.parametrize("op", RECURRENCES, ids=lambda op: op.name)
NAN = float("nan")
Net = tuple[Any, GatedDeltaWeights | Mamba2Weights, int, tuple[int, ...], tuple[int, ...]]
"""A layer, its weights, the width of what it takes, and the shapes of a slot's window and state."""


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_step_of_everything_equals_the_recurrence(op: Recurrence, dtype: torch.dtype, device: torch.device) -> None:
    """Decodes, PAD rows, fresh and continued runs of 1 and of 63 tokens and more, a run without a slot, taps
    on the grid, off it and at the end; NaN in every slot that may not be read."""
    decodes = [Run(7, slot=3), PAD_ROW, Run(0, slot=8, fresh=True)]
    prefills = [Run(40, 50, slot=1), Run(0, 63, slot=2, fresh=True), Run(64, 1, slot=4), Run(0, 3)]
    taps = (TapPoint(3, 1, 5), TapPoint(3, 24, 6), TapPoint(3, 50, 7), TapPoint(4, 9, 9))
    runs = make_runs(decodes, prefills, taps=taps)
    states = op.states(12)
    states[[0, 2, 5, 6, 7, 8, 9, 10, 11]] = NAN
    inputs = {name: x.to(dtype) for name, x in op.inputs(tokens_in(runs), 0).items()}
    want, want_states = op.run_twin(inputs, states, runs)
    got, got_states = op.run(inputs, states, runs, device)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, **close(dtype))
    torch.testing.assert_close(got_states, want_states, equal_nan=True, **close(torch.float32))

    stale = make_runs([Run(7, slot=3), PAD_ROW, Run(5, slot=8)], [])  # the control: what is not fresh is read
    made, _ = op.run({name: x[:3] for name, x in inputs.items()}, states, stale, device)
    assert made[:2].isfinite().all()
    assert made[2].isnan().all()


@pytest.mark.parametrize("op", RELEASED_MAMBA2, ids=lambda op: op.name)
def test_prompts_of_released_head_dims_equal_the_recurrence(op: Recurrence, device: torch.device) -> None:
    """Triton 3.6 compiled some of them to products that read other memory (``compile_gate``)."""
    runs = make_runs([], [Run(40, 90, slot=1)])
    states = op.states(3)
    inputs = {name: x.bfloat16() for name, x in op.inputs(90, 4).items()}
    want, want_states = op.run_twin(inputs, states, runs)
    got, got_states = op.run(inputs, states, runs, device)
    torch.testing.assert_close(got, want, **close(torch.bfloat16))
    torch.testing.assert_close(got_states, want_states, **close(torch.float32))


@each
def test_a_prompt_in_two_pieces_cut_on_the_grid_is_the_same_to_the_last_bit(
    op: Recurrence, device: torch.device
) -> None:
    inputs, states = op.inputs(70, 3), op.states(3)
    whole, whole_states = op.run(inputs, states, make_runs([], [Run(0, 70, slot=1, fresh=True)]), device)
    first, between = op.run(
        {name: x[:64] for name, x in inputs.items()}, states, make_runs([], [Run(0, 64, slot=1, fresh=True)]), device
    )
    rest = make_runs([], [Run(64, 6, slot=1)])
    second, end = op.run({name: x[64:] for name, x in inputs.items()}, between, rest, device)
    assert torch.equal(torch.cat((first, second)), whole)
    assert torch.equal(end, whole_states)

    lost, _ = op.run({name: x[64:] for name, x in inputs.items()}, states, rest, device)  # the control
    assert (lost - second).abs().max() > 1e-3


@each
def test_a_tap_is_the_state_that_a_run_goes_on_from_in_prefills_and_decodes(
    op: Recurrence, device: torch.device
) -> None:
    inputs, states = op.inputs(12, 5), op.states(3)
    runs = make_runs([], [Run(0, 12, slot=0, fresh=True)], taps=(TapPoint(0, 10, 1),))
    whole, held = op.run(inputs, states, runs, device)
    for at, resumed in ((10, make_runs([Run(10, slot=1)], [])), (11, make_runs([], [Run(11, 1, slot=1)]))):
        made, held = op.run({name: x[at : at + 1] for name, x in inputs.items()}, held, resumed, device)
        torch.testing.assert_close(made, whole[at : at + 1], **close(torch.float32))
    torch.testing.assert_close(held[1], held[0], **close(torch.float32))
    assert torch.equal(held[2], states[2])


@each
def test_company_in_the_step_changes_nothing(op: Recurrence, device: torch.device) -> None:
    runs = make_runs([Run(7, slot=3)], [Run(40, 30, slot=1), Run(0, 5, slot=2, fresh=True)])
    inputs, states = op.inputs(tokens_in(runs), 0), op.states(4)
    together, after = op.run(inputs, states, runs, device)
    for index, alone in ((0, make_runs([Run(7, slot=3)], [])), (1, make_runs([], [Run(40, 30, slot=1)]))):
        at = span(runs, index)
        made, states_alone = op.run({name: x[at] for name, x in inputs.items()}, states, alone, device)
        assert torch.equal(made, together[at])
        slot = alone.slots[0]
        assert torch.equal(states_alone[slot], after[slot])
        assert not torch.equal(after[slot], states[slot])  # the control: there was something to change


@pytest.mark.parametrize("op", [*RECURRENCES, WIDE_MAMBA1], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_state_in_few_bits_is_rounded_by_the_rule_after_every_token(
    op: Recurrence, dtype: torch.dtype, device: torch.device
) -> None:
    """Each token from the state that the kernel stored before it, as taps show. An accumulator that is off by
    its last bit may be rounded the other way. Through the sums of the next token such a step reaches small
    numbers of its column, as several of their own. Float32 in another order did so in 4 to 39 of 100 runs."""
    taps = tuple(TapPoint(run, at, slot) for run, at, slot in ((2, 1, 3), (2, 2, 4), (2, 3, 5), (3, 1, 6)))
    runs = make_runs([Run(9, slot=0), PAD_ROW], [Run(62, 4, slot=1), Run(0, 2, slot=2, fresh=True)], taps=taps)
    inputs, states = op.inputs(tokens_in(runs), 4), op.states(8, dtype)
    states[2:] = NAN
    got, got_states = op.run(inputs, states, runs, device, layer=5)
    assert got_states[7].isnan().all()

    tokens = [0, *range(2, 8)]
    before = torch.cat((states[[0, 1]], got_states[[3, 4, 5, 7, 6]]))
    after = got_states[[0, 3, 4, 5, 1, 6, 2]]
    one_each = make_runs(
        [Run(9, slot=0), *(Run(62 + at, slot=1 + at) for at in range(4)), Run(0, slot=5, fresh=True), Run(1, slot=6)],
        [],
    )
    by_token = {name: x[tokens] for name, x in inputs.items()}
    want, want_states = op.run_twin(by_token, before, one_each, layer=5)
    step = {"rtol": 2.0**-7, "atol": 1e-30}
    if dtype == torch.float16:
        step = {"rtol": 2.0**-10, "atol": 2.0**-23}
    torch.testing.assert_close(after, want_states, **step)
    assert (after != want_states).float().mean() < 1e-3
    torch.testing.assert_close(got[tokens], want, rtol=1e-3, atol=1e-3)

    _, other_layer = op.run(inputs, states, runs, device, layer=6)  # the control: the layer is in the rule
    assert (other_layer[[0, 3, 4, 5, 1, 6, 2]] != want_states).float().mean() > 0.05


@pytest.mark.parametrize("name", ["gated_delta", "kimi_delta", "mamba1", "mamba2"])
def test_a_model_of_16_bits_rounds_a_state_in_few_bits_once_a_chunk(name: str, device: torch.device) -> None:
    """Chunks of 4, 6, 58 and 5 tokens, with taps after the first three, each from the state stored before it."""
    op = next(op for op in RECURRENCES if op.name == name)
    cuts = [0, 4, 10, 68, 73]
    taps = tuple(TapPoint(0, cut, 3 + index) for index, cut in enumerate(cuts[1:4]))
    runs = make_runs([], [Run(60, 73, slot=1)], taps=taps)
    inputs = {name: x.bfloat16() for name, x in op.inputs(73, 3).items()}
    states = op.states(6, torch.float16)
    got, got_states = op.run(inputs, states, runs, device, layer=5)
    before = torch.cat((states[1:2], got_states[[3, 4, 5]])).float()
    after = got_states[[3, 4, 5, 1]]
    for chunk, (first, end) in enumerate(pairwise(cuts)):
        alone = make_runs([], [Run(60 + first, end - first, slot=chunk)])
        want, wide = op.run_twin({name: x[first:end] for name, x in inputs.items()}, before, alone)
        torch.testing.assert_close(got[first:end], want, **close(torch.bfloat16))
        stored, other = (rounded(wide[chunk : chunk + 1], torch.float16, [60 + end - 1], layer)[0] for layer in (5, 6))
        torch.testing.assert_close(after[chunk].float(), stored, rtol=2.0**-10, atol=2.0**-23)
        assert (after[chunk] != stored).float().mean() < 0.02
        assert (after[chunk] != other).float().mean() > 0.2  # the control: the layer is in the rule


@pytest.mark.parametrize("decay", [0.0, -60.0, float("-inf")])
@pytest.mark.parametrize("name", ["gated_delta", "kimi_delta"])
def test_repeated_keys_under_no_decay_and_under_all_of_it(name: str, decay: float, device: torch.device) -> None:
    op = next(op for op in RECURRENCES if op.name == name)
    runs, states = make_runs([], [Run(0, 66, slot=0, fresh=True)]), op.states(1)
    inputs = op.inputs(66, 0)
    inputs["k"] = inputs["k"][:1].expand(66, -1, -1)
    inputs["g"] = torch.full_like(inputs["g"], decay)
    inputs["beta"] = torch.full_like(inputs["beta"], 1.6)
    want, want_states = op.run_twin(inputs, states, runs)
    got, got_states = op.run(inputs, states, runs, device)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(got_states, want_states, rtol=1e-4, atol=2e-5)


def test_lines_that_decay_by_nothing_beside_lines_that_decay_by_all(device: torch.device) -> None:
    """Kimi's decay of each line: 0, 1e-7, 1, 60, all, and turns of 0 and 70. A chunk cut by a tap, too."""
    op = next(op for op in RECURRENCES if op.name == "kimi_delta")
    runs, states = make_runs([], [Run(0, 66, slot=0, fresh=True)], taps=(TapPoint(0, 37, 1),)), op.states(2)
    inputs = op.inputs(66, 2)
    lines = torch.tensor([0.0, -1e-7, -1.0, -60.0, float("-inf"), 0.0]).repeat(4)
    inputs["g"] = lines.expand(66, 1, -1).clone()
    inputs["g"][1::2, :, 5::6] = -70.0
    want, want_states = op.run_twin(inputs, states, runs)
    got, got_states = op.run(inputs, states, runs, device)
    torch.testing.assert_close(got, want, **close(torch.float32))
    torch.testing.assert_close(got_states, want_states, **close(torch.float32))


def gated_delta_net(device: torch.device) -> Net:
    def made(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)

    weights = GatedDeltaWeights(
        conv_CK=made(80, 4, seed=1),
        decay_H=-made(2, seed=2).exp(),
        dt_bias_H=made(2, seed=3),
        norm_V=made(16, seed=4),
        norm_eps=1e-6,
        shape=GatedDelta(1, 2, 24, 16, 4),
    )
    return gated_delta_layer, weights, 80 + 32 + 4, (80, 3), (2, 24, 16)


def mamba2_net(device: torch.device) -> Net:
    def made(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)

    weights = Mamba2Weights(
        conv_CK=made(80, 4, seed=1),
        conv_bias_C=made(80, seed=2),
        a_H=-made(2, seed=3).exp(),
        d_H=made(2, seed=4),
        dt_bias_H=made(2, seed=5),
        norm_C=made(40, seed=6),
        norm_eps=1e-6,
        shape=Mamba2(2, 20, 1, 20, 4, True, False, (0.0, float("inf"))),
    )
    return mamba2_layer, weights, 40 + 80 + 2, (80, 3), (2, 20, 20)


@pytest.mark.parametrize("net", [gated_delta_net, mamba2_net])
def test_a_layer_is_what_its_ops_are_and_asks_nothing_of_the_device(
    net: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would bring numbers to the host, and so wait for the device, is not called for any run."""
    layer, weights, width, window, part = net(device)
    runs = make_runs(
        [Run(7, slot=3), PAD_ROW], [Run(60, 9, slot=1), Run(0, 5, slot=2, fresh=True)], taps=(TapPoint(2, 4, 0),)
    )
    noise = torch.Generator().manual_seed(9)
    made = torch.randn(tokens_in(runs), width, generator=noise)
    windows, states = (torch.randn(4, *shape, generator=noise) for shape in (window, part))
    cold = [x.to(device, copy=True) for x in (windows, states)]
    gpu.choose("torch")
    want = layer(made.to(device), weights, *cold, on_device(runs, device))
    gpu.choose("triton")
    held = [x.to(device, copy=True) for x in (windows, states)]
    moved = on_device(runs, device)
    asked: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "nonzero", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, name, lambda *_, name=name, **__: asked.append(name))
        got = layer(made.to(device), weights, *held, moved)
        assert not asked
        held[0].tolist()  # the control: a question is noticed
        assert asked == ["tolist"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    for mine, other, before in zip(held, cold, (windows, states), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)
        assert not torch.equal(mine.cpu(), before)  # the control: both moved on
