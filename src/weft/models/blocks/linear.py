"""The matrix product that every block is made of, the norm between blocks, and the dense feed-forward.

Weights are plain tensors, never Parameters: there is no gradient, no module tree, no hook. Projections of
the same input are one ``Linear`` (a wide matrix product reads the input once and keeps a CPU's threads
busy); the block splits the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.tensor.ops.rms_norm import rms_norm


def by_head(x_TC: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, heads * D] -> [T, heads, D]; a view where the input's strides allow one."""
    return x_TC.reshape(x_TC.shape[0], heads, x_TC.shape[1] // heads)


@dataclass(slots=True)
class Linear:
    """``weight`` [out, in], ``bias`` [out] or None: x [..., in] -> [..., out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Norm:
    """RMS norm over the last dim. ``plus_one``: the stored weight is the distance from 1 (Qwen3.5)."""

    weight: torch.Tensor
    eps: float
    plus_one: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, plus_one=self.plus_one)


@dataclass(slots=True)
class SwiGlu:
    """down(silu(gate(x)) * up(x)); ``gate_up`` has the gate's rows first (Shazeer, 2020)."""

    gate_up: Linear
    down: Linear

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
