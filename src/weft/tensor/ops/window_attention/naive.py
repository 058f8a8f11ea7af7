"""Reference of window_attention: one query at a time in float64, keys fetched from the ring one by one."""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.units import PAD


def window_attention(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor,
                     ring_S2HWD: torch.Tensor, runs: Runs, scale: float) -> torch.Tensor:
    group, window = q_THD.shape[1] // k_THD.shape[1], ring_S2HWD.shape[3]
    out = torch.zeros(q_THD.shape, dtype=torch.float64)
    for run in range(runs.run_count):
        slot, start = runs.slots[run], max(runs.starts[run], 0)
        alone = slot == PAD or runs.fresh[run]
        ring = ring_S2HWD.new_zeros(ring_S2HWD.shape[1:]) if alone else ring_S2HWD[slot].clone()
        first = start if alone else 0
        taps = {tap.offset: tap.slot for tap in runs.taps if tap.run == run}
        for index in range(runs.lengths[run]):
            token, position = runs.offsets[run] + index, start + index
            ring[0, :, position % window] = k_THD[token].to(ring.dtype)
            ring[1, :, position % window] = v_THD[token].to(ring.dtype)
            seen = [p % window for p in range(max(first, position - window + 1), position + 1)]
            k_HSD, v_HSD = (part[:, seen].double().repeat_interleave(group, dim=0) for part in ring)
            weights_HS = ((k_HSD * q_THD[token, :, None].double()).sum(-1) * scale).softmax(dim=-1)
            out[token] = (weights_HS[..., None] * v_HSD).sum(1)
            if index + 1 in taps and taps[index + 1] != PAD:
                ring_S2HWD[taps[index + 1]] = ring
        if slot != PAD and runs.keeps(run):
            ring_S2HWD[slot] = ring
    return out.to(q_THD.dtype)
