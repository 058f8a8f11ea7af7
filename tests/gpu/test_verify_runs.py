"""Verify runs in Triton: rows as of decodes, slots left alone, and a replay that writes what was right.

The compile gate has no entry of their own: a window is a short run of the same kernels, and its slots are
saved and put back by torch (``weft.tensor.state_rows``).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.recurrences import RECURRENCES, Recurrence
from tests.gpu.steps import on_device, strided_on
from tests.gpu.tolerances import close
from tests.ops.batches import Run, make_runs
from weft.runner.staging import Staging
from weft.runner.verify import replay
from weft.tensor.inputs import Runs
from weft.tensor.ops.conv import short_conv
from weft.tensor.replay_log import ReplayLog

each = pytest.mark.parametrize("op", RECURRENCES, ids=lambda op: op.name)
WINDOW = 4
"""Tokens of the window, behind a decode and before a prompt."""


def with_window(device: torch.device) -> Runs:
    """A decode in slot 3, a window in slot 1, a prompt of 3 tokens in slot 0."""
    runs = make_runs([Run(9, slot=3)], [Run(70, WINDOW, slot=1), Run(0, 3, slot=0, fresh=True)])
    return dataclasses.replace(on_device(runs, device), verify_count=1, log=ReplayLog(1, WINDOW))


@each
def test_a_window_has_the_rows_of_decodes_and_leaves_its_slot_until_the_replay(
    op: Recurrence, device: torch.device
) -> None:
    inputs, states = op.inputs(1 + WINDOW + 3, 1), op.states(4)
    own = {name: x[1 : 1 + WINDOW] for name, x in inputs.items()}
    rows, after = [], [states]
    for at in range(WINDOW):
        made, held = op.run(
            {name: x[at : at + 1] for name, x in own.items()}, after[-1], make_runs([Run(70 + at, slot=1)], []), device
        )
        rows.append(made)
        after.append(held)
    held = strided_on(states, device)
    runs = with_window(device)
    step = op.call(op.op, {name: x.to(device) for name, x in inputs.items()}, held, runs, 0).cpu()
    torch.testing.assert_close(step[1 : 1 + WINDOW], torch.cat(rows), **close(torch.float32))
    assert torch.equal(held[1].cpu(), states[1])
    assert not torch.equal(held[3].cpu(), states[3])  # the decode beside it did write

    replay(runs, [3], Staging(device))
    torch.testing.assert_close(held[1].cpu(), after[3][1], **close(torch.float32))
    for wrong in (2, 4):  # the controls: one too few, one too many
        assert (held[1].cpu() - after[wrong][1]).abs().max() > 1e-3


def test_a_window_of_the_short_convolution_does_too(device: torch.device) -> None:
    noise = torch.Generator().manual_seed(2)
    channels, width = 20, 3
    weight = torch.randn(channels, width, generator=noise).to(device)
    windows = torch.randn(4, channels, width - 1, generator=noise)
    projected = torch.randn(1 + WINDOW + 3, 3 * channels, generator=noise)
    own, held, rows, after = projected[1 : 1 + WINDOW], strided_on(windows, device), [], []
    for at in range(WINDOW):
        runs = on_device(make_runs([Run(70 + at, slot=1)], []), device)
        rows.append(short_conv(own[at : at + 1].to(device), weight, None, held, runs).cpu())
        after.append(held[1].cpu().clone())
    held, runs = strided_on(windows, device), with_window(device)
    step = short_conv(projected.to(device), weight, None, held, runs).cpu()
    torch.testing.assert_close(step[1 : 1 + WINDOW], torch.cat(rows), **close(torch.float32))
    assert torch.equal(held[1].cpu(), windows[1])
    replay(runs, [3], Staging(device))
    torch.testing.assert_close(held[1].cpu(), after[2], **close(torch.float32))
    assert not torch.equal(held[1].cpu(), after[1])  # the control: one too few
