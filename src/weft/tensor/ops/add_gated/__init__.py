"""The output of a shared expert, added to that of the routed experts through a gate for each token."""

from __future__ import annotations

import torch

from weft.tensor import gpu


def add_gated(y_TD: torch.Tensor, x_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """``y + sigmoid(gate) * x`` in the dtype of ``y_TD``. torch rounds each step to it, Triton the sum alone.

    Source: transformers ``Qwen2MoeSparseMoeBlock``.
    """
    if gpu.fits(y_TD, x_TD, gate_T1) and y_TD.dtype == x_TD.dtype == gate_T1.dtype:
        from weft.tensor.kernels import add_gated as triton
        return triton.add_gated(y_TD, x_TD, gate_T1)
    return y_TD + torch.sigmoid(gate_T1) * x_TD
