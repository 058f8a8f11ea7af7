"""causal_conv by ``csrc/conv.inl``."""

from __future__ import annotations

from typing import Any, Literal

import torch

from weft.tensor import native
from weft.tensor.inputs import Runs

KERNEL_MAX = 8
NO_GATE = (0, 0, 0, 0)


def supported(x_TC: torch.Tensor, weight_CK: torch.Tensor, window_SCW: torch.Tensor) -> bool:
    return (native.fits(x_TC) and weight_CK.dtype in native.DTYPES and window_SCW.dtype in native.DTYPES
            and weight_CK.shape[0] % native.LANES == 0 and x_TC.stride(1) == 1
            and 1 <= window_SCW.shape[2] < KERNEL_MAX)


def weights_of(weight_CK: torch.Tensor, bias_C: torch.Tensor | None) -> Any:
    """The arguments of the extension: addresses of weight and bias, dtype, kernel size."""
    assert weight_CK.is_contiguous(), f"a conv weight of strides {weight_CK.stride()} is not dense"
    assert bias_C is None or (bias_C.dtype == weight_CK.dtype and bias_C.is_contiguous())
    return (weight_CK.data_ptr(), 0 if bias_C is None else bias_C.data_ptr(),
            native.DTYPES[weight_CK.dtype], weight_CK.shape[1])


def causal_conv(x_TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
                activation: Literal["silu"] | None, window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    native.extension().conv(
        native.runs_of(runs), native.plain_rows_of(x_TC), NO_GATE, NO_GATE, weights_of(weight_CK, bias_C),
        activation == "silu", y_TC.data_ptr(), native.slots_of(window_SCW), x_TC.shape[1])
    return y_TC
