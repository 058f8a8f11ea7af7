"""The Mamba-2 layer: convolution, selective state space, norm gated before it normalises.

    x_TD --in--> [ gate | x | B | C | dt ]                 rows of one matrix, as checkpoints store them
                   causal conv + silu over x B C (window state)
                   state space over (x, dt, A, B, C, D) (recurrent state, fp32); dt = softplus(dt + bias)
                   RMS norm of (y * silu(gate)), per group --out--> y_TD

Families differ in where the gate comes in (``Mamba2.norm``). Sources: Mamba-2 (Dao and Gu, 2024),
transformers ``GraniteMoeHybridMambaLayer`` and ``FalconH1Mixer``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.architecture import Mamba2
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, Projection, fused_block_of
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.recurrent_layers import MAMBA2, Mamba2Weights, mamba2_layer


@dataclass(slots=True)
class Mamba2Block:
    """``conv``: [channels, kernel], ``conv_bias``: [channels] or None; ``a`` (-exp(A_log)), ``d``,
    ``dt_bias``: float32 [heads]; ``norm``: [heads * head_dim], None for a layer without; ``factors``: on each
    output of ``project``, None where all are 1."""

    shape: Mamba2
    project: Linear
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor | None
    norm_eps: float
    out: Projection
    factors: torch.Tensor | None = None
    core: Mamba2Weights = field(init=False)
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self.core = Mamba2Weights(
            self.conv, self.conv_bias, self.a, self.d, self.dt_bias, self.norm, self.norm_eps,
            shape.norm == "gate_first", shape.heads, shape.groups, shape.head_dim, shape.state_dim,
            shape.dt_limit)
        # The fused kernels know no factors on the parts of the projection (Falcon-H1).
        self.fused = None if self.factors is not None else fused_block_of(self.project, self.out)

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        if self.fused is not None and inputs.asked is None:
            y_TD = MAMBA2.run_fused(self.fused, x_TD, self.core, cache.state["conv"],
                                    cache.state["recurrent"], inputs.runs, cache.layer)
            if y_TD is not None:
                return y_TD
        projected = self.project(x_TD)
        if self.factors is not None:
            projected = projected * self.factors
        y_TC = mamba2_layer(projected, self.core, cache.state["conv"], cache.state["recurrent"], inputs.runs,
                            cache.layer)
        return self.out(inputs.asked_of(y_TC))

    def staged(self, x_TD: torch.Tensor, cache: LayerCache) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        if self.fused is None:
            return None
        return MAMBA2.staged(self.fused, x_TD, self.core, cache.state["conv"], cache.state["recurrent"],
                      cache.layer)
