"""tiled_linear by the C++ kernel (csrc/tiles.inl)."""

from __future__ import annotations

from typing import Any

import torch

from weft.tensor import native
from weft.tensor.tiled import TiledWeight

_FORMS = {torch.bfloat16: 4, torch.float32: 5}
"""Their numbers in csrc/kernels.hpp."""


def supported(x: torch.Tensor, weight: TiledWeight) -> bool:
    if not native.in_use() or x.dtype != weight.tiles.dtype or not x.is_cpu:
        return False
    return x.dtype == torch.float32 or bool(native.extension().has_bf16_products())


def tiled_linear(x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None = None,
                 out: torch.Tensor | None = None) -> torch.Tensor:
    columns = x.shape[-1]
    assert weight.columns == columns
    x_RI = x if x.ndim == 2 else x.reshape(-1, columns)
    if x_RI.stride(1) != 1:
        x_RI = x_RI.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    rows = x_RI.shape[0]
    if out is None:
        out = torch.empty((rows, weight.rows), dtype=x.dtype)
    assert out.dtype == x.dtype
    assert out.is_contiguous()
    assert out.numel() == rows * weight.rows
    native.extension().linear(x_RI.data_ptr(), x_RI.stride(0), native.DTYPES[x.dtype], rows,
                              weight_of(weight), 0 if bias is None else bias.data_ptr(), False,
                              out.data_ptr())
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.rows)


def weight_of(weight: TiledWeight) -> Any:
    """As the extension takes it."""
    assert weight.tiles.is_contiguous()
    return (weight.tiles.data_ptr(), _FORMS[weight.tiles.dtype], weight.columns, weight.rows, 0, False, 0,
            weight.columns)
