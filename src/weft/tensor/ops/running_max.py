"""Running maximum with decay: one number for each head, kept from token to token.

    m <- max(m + log_decay_t, x_t)

Token by token in every form: one addition and one comparison for each head, and the same bits however a
prompt is cut. Source: Beck et al., "xLSTM" (2024), equation 15.
"""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.tensor.op import recurrent_op
from weft.tensor.state_rows import decode_blocks, prefill_rows
from weft.units import PAD


@recurrent_op("weft.tensor.kernels.running_max")
def running_max(
    log_decay_TH: torch.Tensor, x_TH: torch.Tensor, state_S1H: torch.Tensor, runs: Runs, *, layer: int = 0
) -> torch.Tensor:
    """Return [T, H] in the dtype of ``x_TH``: m after each token. ``log_decay_TH`` [T, H] is at most 0. Any float
    dtypes; computed in float32. A fresh state is 0.
    """
    dtype = x_TH.dtype
    log_decay_TH, x_TH = log_decay_TH.float(), x_TH.float()
    out_TH = torch.empty_like(x_TH)
    n = runs.decode_count
    for rows in decode_blocks(runs, state_S1H) if n else ():
        state = rows.read(state_S1H, "running_max.state")
        torch.maximum(state[:, 0] + log_decay_TH[rows.span], x_TH[rows.span], out=out_TH[rows.span])
        rows.write_back(state_S1H, out_TH[rows.span][:, None])
    if n == runs.run_count:
        return out_TH.to(dtype)
    chosen = range(n, runs.run_count)
    rows = prefill_rows(runs, chosen, "state_rows.prefill")
    state = rows.read(state_S1H, "running_max.state")
    taps = {(tap.run, tap.offset): tap.slot for tap in runs.taps if tap.slot != PAD}
    for row, run in enumerate(chosen):
        begin, m_H = runs.offsets[run], state[row, 0]
        for place in range(runs.lengths[run]):
            token = begin + place
            torch.maximum(m_H.add_(log_decay_TH[token]), x_TH[token], out=m_H)
            out_TH[token] = m_H
            if (slot := taps.get((run, place + 1))) is not None:
                state_S1H[slot, 0] = m_H
    rows.write_back(state_S1H, state)
    return out_TH.to(dtype)
