"""Reference of causal_conv: token by token in float64, shifting the window."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.units import PAD


def causal_conv(x_TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
                activation: Literal["silu"] | None, window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    y_TC = torch.zeros(x_TC.shape, dtype=torch.float64)
    for run in range(runs.run_count):
        slot = runs.slots[run]
        if slot == PAD or runs.fresh[run]:
            window_CW = torch.zeros(window_SCW.shape[1:], dtype=torch.float64)
        else:
            window_CW = window_SCW[slot].double()
        taps = {tap.offset: tap.slot for tap in runs.taps if tap.run == run}
        for index in range(runs.lengths[run]):
            token = runs.offsets[run] + index
            seen_CK = torch.cat((window_CW, x_TC[token, :, None].double()), dim=1)
            y_TC[token] = (seen_CK * weight_CK.double()).sum(1)
            window_CW = seen_CK[:, 1:]
            if index + 1 in taps and taps[index + 1] != PAD:
                window_SCW[taps[index + 1]] = window_CW.to(window_SCW.dtype)
        if slot != PAD and runs.keeps(run):
            window_SCW[slot] = window_CW.to(window_SCW.dtype)
    if bias_C is not None:
        y_TC = y_TC + bias_C.double()
    return (F.silu(y_TC) if activation == "silu" else y_TC).to(x_TC.dtype)
