"""The dense feed-forward in its less usual forms: another activation, no gate, factors.

    down(act(gate(x)) * up(x))      or, without a gate,      down(act(up(x)))

``SwiGlu`` (``blocks.linear``) is the usual one. Sources: Primer (So et al., 2021) for squared relu;
transformers ``FalconH1MLP``, ``NemotronHMLP``, ``Zamba2MLP``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.families.architecture import Dense
from weft.models.blocks.linear import Linear, Projection
from weft.tensor import gpu
from weft.tensor.ops.activation import activate, silu_mul


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
