"""The activation functions of feed-forward layers, by their name in an ``Architecture``."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["silu", "gelu", "relu2"]


def activate(x: torch.Tensor, name: Activation) -> torch.Tensor:
    """Elementwise, in the dtype of ``x``: silu, gelu (the exact one, by erf), or the square of relu."""
    if name == "silu":
        return F.silu(x)
    if name == "gelu":
        return F.gelu(x)
    return F.relu(x).square()
