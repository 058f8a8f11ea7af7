"""Reference of mamba2: the recurrence, token by token, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.tensor.rounding import rounded_state
from weft.units import PAD


def mamba2(x_THP: torch.Tensor, dt_TH: torch.Tensor, A_H: torch.Tensor, B_TGN: torch.Tensor,
           C_TGN: torch.Tensor, D_H: torch.Tensor, dt_bias_H: torch.Tensor, state_SHPN: torch.Tensor,
           runs: Runs, *, dt_limit: tuple[float, float] = (0.0, float("inf")),
           layer: int = 0) -> torch.Tensor:
    group = x_THP.shape[1] // B_TGN.shape[1]
    x = x_THP.double()
    step = F.softplus(dt_TH.double() + dt_bias_H.double()).clamp(*dt_limit)
    decay = (step * A_H.double()).exp()
    b = B_TGN.double().repeat_interleave(group, dim=1)
    c = C_TGN.double().repeat_interleave(group, dim=1)
    out = x * D_H.double()[:, None]
    for run in range(runs.run_count):
        slot = runs.slots[run]
        if slot == PAD or runs.fresh[run]:
            state = torch.zeros(state_SHPN.shape[1:], dtype=torch.float64)
        else:
            state = state_SHPN[slot].double()
        taps = {tap.offset: tap.slot for tap in runs.taps if tap.run == run}
        for index in range(runs.lengths[run]):
            t = runs.offsets[run] + index
            pushed = (x[t] * step[t, :, None])[:, :, None] * b[t, :, None, :]
            state = state * decay[t, :, None, None] + pushed
            out[t] += (state * c[t, :, None, :]).sum(-1)
            state = rounded_state(state, state_SHPN.dtype, runs.starts[run] + index, layer)
            if index + 1 in taps and taps[index + 1] != PAD:
                state_SHPN[taps[index + 1]] = state.to(state_SHPN.dtype)
        if slot != PAD and runs.keeps(run):
            state_SHPN[slot] = state.to(state_SHPN.dtype)
    return out.to(x_THP.dtype)
