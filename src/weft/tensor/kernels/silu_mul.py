"""silu_mul in Triton: a program is BLOCK columns of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Compilation, dense_rows, launch
from weft.units import ceil_div

BLOCK = 1024


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    gate_up_TJ = dense_rows(gate_up_TJ)
    rows_TJ = gate_up_TJ if gate_up_TJ.ndim == 2 else gate_up_TJ.reshape(-1, gate_up_TJ.shape[-1])
    rows, width = rows_TJ.shape[0], rows_TJ.shape[1] // 2
    out = torch.empty((*gate_up_TJ.shape[:-1], width), dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
    if rows:
        launch(_silu_mul, (rows, ceil_div(width, BLOCK)))(rows_TJ, rows_TJ.stride(0), width, out, BLOCK=BLOCK)
    return out


@triton.jit
def _silu_mul(gate_up, row_stride, width, out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_up += row * row_stride
    gate = tl.load(gate_up + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + column, mask=mask, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=mask)


def compilations() -> list[Compilation]:
    signature = {"gate_up": "*bf16", "row_stride": "i32", "width": "i32", "out": "*bf16",
                 "BLOCK": "constexpr"}
    return [Compilation("silu_mul", _silu_mul, signature, {"BLOCK": BLOCK})]
