"""Reference of rms_norm: the formula, in float64."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False,
             gate: torch.Tensor | None = None, gate_first: bool = False,
             group_size: int | None = None) -> torch.Tensor:
    wide = x.double()
    if gate is not None and gate_first:
        wide = wide * torch.nn.functional.silu(gate.double())
    groups = wide.reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
    groups = groups / torch.sqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    wide = groups.flatten(-2) * (weight.double() + (1.0 if plus_one else 0.0))
    if gate is not None and not gate_first:
        wide = wide * torch.nn.functional.silu(gate.double())
    return wide.to(x.dtype)
