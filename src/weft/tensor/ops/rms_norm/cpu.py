"""rms_norm in torch: few passes, float32 sums, rounded to the model's dtype where transformers rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False,
             gate: torch.Tensor | None = None, gate_first: bool = False,
             group_size: int | None = None) -> torch.Tensor:
    wide = x.float()
    if gate is not None and gate_first:
        wide = wide * F.silu(gate.float())
    groups = wide.reshape(*x.shape[:-1], -1, group_size) if group_size else wide
    norms: torch.Tensor = torch.linalg.vector_norm(groups, dim=-1, keepdim=True)
    inverse = norms.square_().div_(groups.shape[-1]).add_(eps).rsqrt_()
    normed = (groups * inverse).reshape(x.shape)
    if plus_one:
        out: torch.Tensor = normed.mul_(1.0 + weight.float()).to(x.dtype)
    else:
        out = normed.to(x.dtype).mul_(weight)
    if gate is not None and not gate_first:
        out = (out.float() * F.silu(gate.float())).to(x.dtype)
    return out
