"""add_norm by ``csrc/norm.inl``."""

from __future__ import annotations

import torch

from weft.tensor import native


def supported(x_TD: torch.Tensor, y_TD: torch.Tensor, weight: torch.Tensor) -> bool:
    return (native.fits(x_TD, y_TD) and weight.dtype in native.DTYPES and x_TD.shape == y_TD.shape
            and x_TD.stride(-1) == 1 and y_TD.is_contiguous() and x_TD.shape[-1] % native.LANES == 0)


def add_norm(x_TD: torch.Tensor, y_TD: torch.Tensor, weight: torch.Tensor, eps: float, *, scale: float,
             plus_one: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dim = x_TD.shape[1]
    assert weight.shape == (dim,)
    assert weight.is_contiguous()
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    native.extension().add_norm(
        native.projected_of(x_TD), native.projected_of(y_TD), scale, dim, y_TD.data_ptr(),
        (weight.data_ptr(), native.DTYPES[weight.dtype], eps), plus_one, out_TD.data_ptr())
    return y_TD, out_TD
