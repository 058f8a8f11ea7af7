"""What causal_conv, gated_delta and mamba2 promise alike, against float64 token by token."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, poison_scratch, span, tokens_in
from tests.ops.recurrent import RECURRENT_OPS, RecurrentOp
from weft.tensor.inputs import Runs, TapPoint
from weft.units import PAD

pytestmark = pytest.mark.parametrize("op", RECURRENT_OPS, ids=lambda op: op.name)

CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def both(op: RecurrentOp, runs: Runs, states: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Outputs and states of the naive twin and of what is used."""
    inputs = op.inputs(tokens_in(runs), seed)
    naive_states, cpu_states = states.clone(), states.clone()
    poison_scratch()
    return (
        op.call("naive", inputs, naive_states, runs),
        naive_states,
        op.call("cpu", inputs, cpu_states, runs),
        cpu_states,
    )


def agree(op: RecurrentOp, runs: Runs, states: torch.Tensor, seed: int = 0) -> None:
    want, want_states, got, got_states = both(op, runs, states, seed)
    torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(got_states, want_states, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("start", [0, 5, 63, 64, 100])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 63, 64, 65, 200])
def test_a_prefill_of_any_length_from_any_position_equals_the_recurrence(
    op: RecurrentOp, start: int, length: int
) -> None:
    agree(op, make_runs([], [Run(start, length, slot=2, fresh=start == 0)]), op.states(4))


def test_a_mixed_batch_equals_the_recurrence_run_by_run(op: RecurrentOp) -> None:
    runs = make_runs(
        [Run(7, slot=3), PAD_ROW, Run(200, slot=0), Run(64, slot=8)],
        [
            Run(0, 65, slot=1, fresh=True),
            Run(40, 170, slot=5),
            Run(128, 64, slot=2),
            Run(0, 3, slot=9, fresh=True),
            Run(63, 2, slot=4),
        ],
    )
    agree(op, runs, op.states(12))


def test_many_short_prompts_share_one_batch(op: RecurrentOp) -> None:
    runs = make_runs([], [Run(0, length, slot=length, fresh=True) for length in range(1, 20)])
    agree(op, runs, op.states(24))


def test_a_decode_that_starts_fresh_starts_from_zeros(op: RecurrentOp) -> None:
    states = op.states(3)
    states[1] = float("nan")
    agree(op, make_runs([Run(4, slot=0), Run(0, slot=1, fresh=True)], []), states)


@pytest.mark.parametrize("cut", [1, 37, 64, 128, 149])
def test_a_run_in_two_pieces_equals_one(op: RecurrentOp, cut: int) -> None:
    length, slot = 150, 1
    inputs = op.inputs(length, 3)
    whole_states, piece_states = op.states(3), op.states(3)
    whole = op.call("cpu", inputs, whole_states, make_runs([], [Run(0, length, slot, fresh=True)]))
    first = op.call(
        "cpu", {k: x[:cut] for k, x in inputs.items()}, piece_states, make_runs([], [Run(0, cut, slot, fresh=True)])
    )
    second = op.call(
        "cpu", {k: x[cut:] for k, x in inputs.items()}, piece_states, make_runs([], [Run(cut, length - cut, slot)])
    )
    torch.testing.assert_close(torch.cat((first, second)), whole, **CLOSE)
    torch.testing.assert_close(piece_states, whole_states, **CLOSE)

    lost_states = op.states(3)  # the control: a second piece that starts from another state must differ
    lost = op.call(
        "cpu", {k: x[cut:] for k, x in inputs.items()}, lost_states, make_runs([], [Run(cut, length - cut, slot)])
    )
    assert (lost - second).abs().max() > 1e-2


def test_a_prefill_goes_on_as_decodes(op: RecurrentOp) -> None:
    inputs = op.inputs(70, 5)
    whole_states, step_states = op.states(3), op.states(3)
    whole = op.call("cpu", inputs, whole_states, make_runs([], [Run(0, 70, slot=0, fresh=True)]))
    pieces = [
        op.call(
            "cpu", {k: x[:60] for k, x in inputs.items()}, step_states, make_runs([], [Run(0, 60, slot=0, fresh=True)])
        )
    ]
    for at in range(60, 70):
        pieces.append(
            op.call(
                "cpu", {k: x[at : at + 1] for k, x in inputs.items()}, step_states, make_runs([Run(at, slot=0)], [])
            )
        )
    torch.testing.assert_close(torch.cat(pieces), whole, **CLOSE)
    torch.testing.assert_close(step_states, whole_states, **CLOSE)


def test_a_fresh_run_over_nan_memory_changes_nothing(op: RecurrentOp) -> None:
    runs = make_runs([Run(9, slot=0)], [Run(0, 90, slot=1, fresh=True), Run(32, 40, slot=2)])
    clean, recycled = op.states(5), op.states(5)
    recycled[1] = recycled[3] = recycled[4] = float("nan")
    inputs = op.inputs(tokens_in(runs), 0)
    want, got = op.call("cpu", inputs, clean, runs), op.call("cpu", inputs, recycled, runs)
    assert torch.equal(got, want)
    assert torch.equal(recycled[:3], clean[:3])

    stale = op.states(5)  # the control: the same run not fresh must read what is there
    stale[1] = float("nan")
    not_fresh = make_runs([Run(9, slot=0)], [Run(64, 90, slot=1), Run(32, 40, slot=2)])
    made = op.call("cpu", inputs, stale, not_fresh)
    assert made[span(runs, 1)].isnan().any()
    assert torch.equal(made[span(runs, 2)], want[span(runs, 2)])


def test_pad_rows_read_and_write_nothing(op: RecurrentOp) -> None:
    states = op.states(4)
    states[0] = states[3] = float("nan")
    before = states.clone()
    runs = make_runs([PAD_ROW, Run(3, slot=1), PAD_ROW, PAD_ROW], [Run(64, 20, slot=2)])
    out = op.call("cpu", op.inputs(tokens_in(runs), 0), states, runs)
    assert out.isfinite().all()
    for slot in (0, 3):
        assert torch.equal(states[slot].nan_to_num(5.0), before[slot].nan_to_num(5.0))
    for slot in (1, 2):  # the control: rows with a slot do write
        assert not torch.equal(states[slot], before[slot])


def test_a_prefill_without_a_slot_writes_nothing(op: RecurrentOp) -> None:
    states = op.states(2)
    states[0] = float("nan")
    before = states.clone()
    runs = make_runs([PAD_ROW], [Run(0, 20), Run(64, 30, slot=1)])
    agree(op, runs, before)
    op.call("cpu", op.inputs(tokens_in(runs), 0), states, runs)
    assert states[0].isnan().all()


def test_pad_rows_work_where_there_are_no_slots_at_all(op: RecurrentOp) -> None:
    runs = make_runs([PAD_ROW], [Run(0, 5)])
    assert op.call("cpu", op.inputs(6, 0), op.states(1)[:0], runs).isfinite().all()


def test_taps_write_the_state_inside_a_run(op: RecurrentOp) -> None:
    taps = (
        TapPoint(1, 1, 6),
        TapPoint(1, 24, 7),
        TapPoint(1, 25, 8),
        TapPoint(1, 150, 9),
        TapPoint(2, 64, 10),
        TapPoint(2, 65, 11),
        TapPoint(3, 2, 12),
        TapPoint(2, 7, PAD),
    )
    runs = make_runs(
        [Run(5, slot=0)], [Run(40, 150, slot=1), Run(0, 130, slot=2, fresh=True), Run(10, 3, slot=3)], taps=taps
    )
    states = op.states(14)
    states[6:] = float("nan")
    agree(op, runs, states)


def test_a_run_resumed_from_a_tap_goes_on_as_if_never_cut(op: RecurrentOp) -> None:
    inputs = op.inputs(100, 2)
    states = op.states(3)
    whole = op.call("cpu", inputs, states, make_runs([], [Run(0, 100, slot=0, fresh=True)], taps=(TapPoint(0, 64, 1),)))
    rest = op.call("cpu", {k: x[64:] for k, x in inputs.items()}, states, make_runs([], [Run(64, 36, slot=1)]))
    torch.testing.assert_close(rest, whole[64:], **CLOSE)
    torch.testing.assert_close(states[1], states[0], **CLOSE)


def test_company_in_the_batch_changes_nothing(op: RecurrentOp) -> None:
    runs = make_runs([Run(7, slot=3)], [Run(40, 90, slot=1), Run(0, 200, slot=2, fresh=True)])
    inputs = op.inputs(tokens_in(runs), 0)
    states = op.states(4)
    together = op.call("cpu", inputs, states, runs)
    for index, run in enumerate([Run(7, slot=3), Run(40, 90, slot=1), Run(0, 200, slot=2, fresh=True)]):
        alone_states = op.states(4)
        alone_runs = make_runs([run], []) if index == 0 else make_runs([], [run])
        alone = op.call("cpu", {k: x[span(runs, index)] for k, x in inputs.items()}, alone_states, alone_runs)
        torch.testing.assert_close(alone, together[span(runs, index)], **CLOSE)
        torch.testing.assert_close(alone_states[run.slot], states[run.slot], **CLOSE)


def test_a_long_step_is_computed_in_blocks_of_chunks(op: RecurrentOp) -> None:
    runs = make_runs(
        [],
        [Run(17, 1300, slot=0), Run(0, 900, slot=1, fresh=True), Run(64, 64, slot=2)],
        taps=(TapPoint(0, 1000, 3), TapPoint(1, 576, 4)),
    )
    agree(op, runs, op.states(5))


def test_half_precision_inputs_are_accumulated_in_float32(op: RecurrentOp) -> None:
    runs = make_runs([Run(3, slot=0)], [Run(10, 150, slot=1)])
    inputs = {name: x.bfloat16() for name, x in op.inputs(tokens_in(runs), 0).items()}
    naive_states, cpu_states = op.states(2), op.states(2)
    want = op.call("naive", inputs, naive_states, runs)
    got = op.call("cpu", inputs, cpu_states, runs)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-4)  # one bf16 rounding apart
    torch.testing.assert_close(cpu_states, naive_states, **CLOSE)
