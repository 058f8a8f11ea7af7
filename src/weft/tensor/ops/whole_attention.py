"""Attention that is not causal, over prompts that a step computes completely: keys and values of the step itself.

Nothing is read from pages, so no run may have tokens before it. Plans ensure that (``Sizes.whole_prompts``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.tensor.ops.paged_attention import attended_with
from weft.units import PAD


def whole_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    runs: Runs,
    scale: float,
    window: int | None = None,
    sinks_TH: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """Return softmax(scale * Q K^T) V, where a token sees all tokens of its run, or with a ``window`` tokens at most
    ``window`` places away: [T, heads, D] in the dtype of ``q_THD``; sums are float32. Rows of PAD runs are zeros. No
    token sees the last ``Runs.unseen`` tokens of its run.

    Source: ``sliding_window_bidirectional_overlay`` of transformers.
    """
    out_THD = torch.zeros_like(q_THD)
    kv_heads, dim = k_THD.shape[1:]
    group = q_THD.shape[1] // kv_heads
    for run in range(runs.run_count):
        length = runs.lengths[run]
        if runs.starts[run] == PAD or not length:
            continue
        rows = slice(runs.offsets[run], runs.offsets[run] + length)
        seen = length - runs.unseen.get(run, 0)
        q_HGLD = q_THD[rows].float().view(length, kv_heads, group, dim).permute(1, 2, 0, 3)
        k_HGSD, v_HGSD = (
            x_THD[rows][:seen].float().permute(1, 0, 2)[:, None].expand(kv_heads, group, seen, dim)
            for x_THD in (k_THD, v_THD)
        )
        if sinks_TH is None and not cap and (window is None or window >= length):
            attended_HGLD = F.scaled_dot_product_attention(q_HGLD, k_HGSD, v_HGSD, scale=scale)
        else:
            places = torch.arange(length, device=q_THD.device)
            sinks_LH = None if sinks_TH is None else sinks_TH[rows]
            seen_LS = (places[:seen] - places[:, None]).abs() <= (length if window is None else window)
            attended_HGLD = attended_with(sinks_LH, q_HGLD, k_HGSD, v_HGSD, seen_LS, scale, cap)
        out_THD[rows] = attended_HGLD.permute(2, 0, 1, 3).reshape(length, kv_heads * group, dim).to(out_THD.dtype)
    return out_THD
