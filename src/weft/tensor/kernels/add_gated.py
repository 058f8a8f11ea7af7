"""add_gated in Triton: a program is BLOCK columns of a row; one launch in place of three."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.launch import TYPES, Blocks, compilation_of, dense_rows
from weft.tensor.gpu.launcher import launch

COLUMNS = Blocks(1024)


@triton.jit
def _add(y, x, gate, out, y_row, x_row, gate_row, D: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = column < D
    factor = tl.sigmoid(tl.load(gate + t * gate_row).to(tl.float32))
    part = factor * tl.load(x + t * x_row + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(y + t * y_row + column, mask=inside, other=0.0).to(tl.float32) + part
    tl.store(out + t * D + column, total.to(out.dtype.element_ty), mask=inside)


def add_gated(y_TD: torch.Tensor, x_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    tokens, width = y_TD.shape
    y_TD, x_TD = dense_rows(y_TD), dense_rows(x_TD)
    out_TD = torch.empty((tokens, width), dtype=y_TD.dtype, device=y_TD.device)
    if tokens:
        block = min(COLUMNS.width, triton.next_power_of_2(width))
        launch(_add, (tokens, triton.cdiv(width, block)))(
            y_TD, x_TD, gate_T1, out_TD, y_TD.stride(0), x_TD.stride(0), gate_T1.stride(0), D=width, BD=block,
            num_warps=COLUMNS.warps)
    return out_TD


def compilations() -> list[Compilation]:
    return [compilation_of(f"add gated {dtype[1:]}", _add, dict.fromkeys(("y", "x", "gate", "out"), dtype),
                           {"D": 2048, "BD": COLUMNS.width}, COLUMNS) for dtype in TYPES.values()]
