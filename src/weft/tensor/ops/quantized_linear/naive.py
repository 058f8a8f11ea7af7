"""Twin of quantized_linear: one row of x and one line of columns at a time, in float64."""

from __future__ import annotations

import torch

from weft.tensor.quantized import LINE, QuantizedWeight


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, *,
                     rounded: bool = False) -> torch.Tensor:
    """``rounded``: x is rounded to int8 by lines of 32, as the kernels may do."""
    values = weight.dense().double()
    rows = x.reshape(-1, x.shape[-1]).double()
    out = torch.zeros(rows.shape[0], weight.rows, dtype=torch.float64)
    for index, row in enumerate(rows):
        for first in range(0, weight.columns, LINE):
            part = row[first:first + LINE]
            if rounded and bool((part != 0).any()):
                scale = part.abs().max() / 127
                part = (part / scale).round() * scale
            out[index] += values[:, first:first + LINE] @ part
    if bias is not None:
        out += bias.double()
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.rows)
