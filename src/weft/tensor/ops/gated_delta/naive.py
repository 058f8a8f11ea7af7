"""Reference of gated_delta: the recurrence, token by token, in float64."""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.tensor.rounding import rounded_state
from weft.units import PAD


def gated_delta(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g_TH: torch.Tensor,
                beta_TH: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs, *,
                scale: float, layer: int = 0) -> torch.Tensor:
    group = v_THV.shape[1] // k_THK.shape[1]
    q = (_unit(q_THK.double()) * scale).repeat_interleave(group, dim=1)
    k = _unit(k_THK.double()).repeat_interleave(group, dim=1)
    v, decay, beta = v_THV.double(), g_TH.double().exp(), beta_TH.double()
    out = torch.zeros(v.shape, dtype=torch.float64)
    for run in range(runs.run_count):
        slot = runs.slots[run]
        if slot == PAD or runs.fresh[run]:
            state = torch.zeros(state_SHKV.shape[1:], dtype=torch.float64)
        else:
            state = state_SHKV[slot].double()
        taps = {tap.offset: tap.slot for tap in runs.taps if tap.run == run}
        for index in range(runs.lengths[run]):
            t = runs.offsets[run] + index
            state = state * decay[t, :, None, None]
            predicted = (state * k[t, :, :, None]).sum(1)
            correction = (v[t] - predicted) * beta[t, :, None]
            state = state + k[t, :, :, None] * correction[:, None, :]
            out[t] = (state * q[t, :, :, None]).sum(1)
            state = rounded_state(state, state_SHKV.dtype, runs.starts[run] + index, layer)
            if index + 1 in taps and taps[index + 1] != PAD:
                state_SHKV[taps[index + 1]] = state.to(state_SHKV.dtype)
        if slot != PAD and runs.keeps(run):
            state_SHKV[slot] = state.to(state_SHKV.dtype)
    return out.to(q_THK.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
