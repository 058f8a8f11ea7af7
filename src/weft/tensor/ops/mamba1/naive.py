"""Reference of mamba1: the recurrence, token by token, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.tensor.rounding import rounded_state
from weft.units import PAD


def mamba1(x_TC: torch.Tensor, dt_TC: torch.Tensor, A_CN: torch.Tensor, B_TN: torch.Tensor,
           C_TN: torch.Tensor, D_C: torch.Tensor, dt_bias_C: torch.Tensor, state_SCN: torch.Tensor,
           runs: Runs, *, layer: int = 0) -> torch.Tensor:
    x, a, b, c = x_TC.double(), A_CN.double(), B_TN.double(), C_TN.double()
    step = F.softplus(dt_TC.double() + dt_bias_C.double())
    out = x * D_C.double()
    for run in range(runs.run_count):
        slot = runs.slots[run]
        if slot == PAD or runs.fresh[run]:
            state = torch.zeros(state_SCN.shape[1:], dtype=torch.float64)
        else:
            state = state_SCN[slot].double()
        taps = {tap.offset: tap.slot for tap in runs.taps if tap.run == run}
        for index in range(runs.lengths[run]):
            t = runs.offsets[run] + index
            state = (step[t, :, None] * a).exp() * state + (step[t] * x[t])[:, None] * b[t]
            out[t] += (state * c[t]).sum(-1)
            state = rounded_state(state, state_SCN.dtype, runs.starts[run] + index, layer)
            if index + 1 in taps and taps[index + 1] != PAD:
                state_SCN[taps[index + 1]] = state.to(state_SCN.dtype)
        if slot != PAD and runs.keeps(run):
            state_SCN[slot] = state.to(state_SCN.dtype)
    return out.to(x_TC.dtype)
