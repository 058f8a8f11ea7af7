"""The Mamba layer: convolution, a bottleneck that makes step, B and C from the token, selective scan, gate.

    x_TD --in--> [ x | gate ]                              rows of one matrix, as checkpoints store them
                   causal conv + silu over x (window state)
                   x --select--> [ dt (rank) | B | C ]     each through an RMS norm in Jamba and Falcon-Mamba
                   dt --step--> one step per channel
                   scan over (x, dt, A, B, C, D) (recurrent state, fp32); dt = softplus(dt + bias)
                   y * silu(gate) --out--> y_TD

Sources: Mamba (Gu and Dao, 2023), transformers ``MambaMixer``, ``FalconMambaMixer``, ``JambaMambaMixer``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.families.architecture import Mamba1
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, Norm, Projection
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.mamba1 import mamba1


@dataclass(slots=True)
class Mamba1Block:
    """``conv``: [channels, kernel], ``conv_bias``: [channels] or None; ``step``: [channels, rank], without
    its bias, which is ``dt_bias``; ``a`` (-exp(A_log)): float32 [channels, N]; ``d``, ``dt_bias``: float32
    [channels]; ``norms``: of dt, B and C, None for a layer without."""

    shape: Mamba1
    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    select: Projection
    step: Linear
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    out: Linear
    norms: tuple[Norm, Norm, Norm] | None = None

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        shape, runs = self.shape, inputs.runs
        x_TC, gate_TC = self.project(x_TD).chunk(2, dim=-1)
        x_TC = causal_conv(x_TC, self.conv, self.conv_bias, "silu", cache.state["conv"], runs)
        parts = torch.split(self.select(x_TC), [shape.dt_rank, shape.state_dim, shape.state_dim], dim=-1)
        if self.norms is not None:
            parts = tuple(norm(part) for norm, part in zip(self.norms, parts, strict=True))
        dt, b_TN, c_TN = parts
        y_TC = mamba1(x_TC, self.step(dt), self.a, b_TN, c_TN, self.d, self.dt_bias, cache.state["recurrent"],
                      runs, layer=cache.layer)
        return self.out(inputs.asked_of(y_TC) * F.silu(inputs.asked_of(gate_TC)))
