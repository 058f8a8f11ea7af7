"""tiled_linear by the C++ kernel (csrc/tiles.inl)."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.weights.tiled import TiledWeight
from weft.tensor.weights.twelve_bit import InTiles


def supported(x: torch.Tensor, weight: InTiles) -> bool:
    if not native.in_use() or x.dtype != weight.dtype or not x.is_cpu:
        return False
    return isinstance(weight, TiledWeight) or bool(native.extension().has_twelve_bit_products())


def tiled_linear(x: torch.Tensor, weight: InTiles, bias: torch.Tensor | None = None,
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
                              weight.native(), 0 if bias is None else bias.data_ptr(), False,
                              out.data_ptr())
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.rows)
