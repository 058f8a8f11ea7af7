"""add_norm in Triton: one program per row; it stores the sum and normalises it from registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.launcher import launch
from weft.tensor.kernels.rms_norm import normed, sizes


def supported(x_TD: torch.Tensor, y_TD: torch.Tensor) -> bool:
    return (x_TD.ndim == 2 and x_TD.dtype == y_TD.dtype and x_TD.shape == y_TD.shape and x_TD.stride(1) == 1
            and y_TD.stride(1) == 1)


def add_norm(x_TD: torch.Tensor, y_TD: torch.Tensor, weight: torch.Tensor, eps: float, *, scale: float,
             plus_one: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, dim = x_TD.shape
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if tokens:
        _, block, warps = sizes(dim)
        launch(_add, (tokens,))(
            x_TD, x_TD.stride(0), y_TD, y_TD.stride(0), scale, weight.contiguous(), eps, out_TD, DIM=dim,
            BLOCK=block, SCALED=scale != 1.0, PLUS_ONE=plus_one, num_warps=warps)
    return y_TD, out_TD


@triton.jit
def _add(x, x_row, y, y_row, scale, weight, eps, out, DIM: tl.constexpr, BLOCK: tl.constexpr,
         SCALED: tl.constexpr, PLUS_ONE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < DIM
    y += row * y_row + d
    added = tl.load(y, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        added = (added * scale).to(y.dtype.element_ty).to(tl.float32)
    added += tl.load(x + row * x_row + d, mask=mask, other=0.0).to(tl.float32)
    stored = added.to(y.dtype.element_ty)
    tl.store(y, stored, mask=mask)
    factor = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    normed_row = normed(stored.to(tl.float32)[None, :], factor[None, :], eps, DIM, PLUS_ONE)
    tl.store(out + row * DIM + d[None, :], normed_row.to(out.dtype.element_ty), mask=mask[None, :])


def compilations() -> list[Compilation]:
    _, block, warps = sizes(5120)
    constants = {"DIM": 5120, "BLOCK": block, "SCALED": True, "PLUS_ONE": True}
    signature = {"x": "*bf16", "x_row": "i32", "y": "*bf16", "y_row": "i32", "scale": "fp32",
                 "weight": "*bf16", "eps": "fp32", "out": "*bf16"}
    return [Compilation("add_norm 5120", _add, signature | dict.fromkeys(constants, "constexpr"), constants,
                        warps)]
