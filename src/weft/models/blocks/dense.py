"""The dense feed-forward: SwiGLU, and its less usual forms with another activation, no gate, or factors.

    down(act(gate(x)) * up(x))      or, without a gate,      down(act(up(x)))

Sources: Shazeer (2020) for SwiGLU; Primer (So et al., 2021) for squared relu; transformers ``FalconH1MLP``,
``NemotronHMLP``, ``Zamba2MLP``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.architecture import Dense
from weft.models.blocks.linear import Linear, Projection, fused_block_of
from weft.tensor import gpu
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.ops.elementwise import activate, run_fused, silu_mul, staged


@dataclass(slots=True)
class SwiGlu:
    """down(silu(gate(x)) * up(x)); ``gate_up`` has the gate's rows first."""

    gate_up: Linear
    down: Linear
    fused: FusedBlock | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.fused = fused_block_of(self.gate_up, self.down)

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        if self.fused is not None and (y_TD := run_fused(self.fused, x_TD)) is not None:
            return y_TD
        return self.down(silu_mul(self.gate_up(x_TD)))

    def staged(self, x_TD: torch.Tensor) -> FusedLayer | None:
        """As a part of a stack; ``x_TD`` is what would come in."""
        return None if self.fused is None else staged(self.fused, x_TD)


@dataclass(slots=True)
class DenseBlock:
    """``into``: rows gate, up when ``shape.gated``, else up alone."""

    shape: Dense
    into: Projection
    down: Linear

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.into(x_TD)
        gate_factor, factor = self.shape.multipliers
        if self.shape.gated and gate_factor == 1.0 and self.shape.activation == "silu" and gpu.fits(inner):
            inner = silu_mul(inner)
        elif self.shape.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate if gate_factor == 1.0 else gate * gate_factor, self.shape.activation) * up
        else:
            inner = activate(inner, self.shape.activation)
        y_TD = self.down(inner)
        return y_TD if factor == 1.0 else y_TD * factor
