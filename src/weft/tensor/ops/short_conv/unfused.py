"""short_conv as a convolution and two products: the definition of the fused kernel, and its fallback."""

from __future__ import annotations

import torch

from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv import causal_conv


def short_conv(projected_TJ: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
               window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    b, c, x = projected_TJ.chunk(3, dim=-1)
    return c * causal_conv(b * x, weight_CK, bias_C, None, window_SCW, runs)
