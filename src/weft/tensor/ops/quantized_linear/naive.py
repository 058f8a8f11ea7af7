"""Reference of quantized_linear: one row of x and one line of columns at a time, in float64."""

from __future__ import annotations

import torch

from weft.tensor.weights.quantized import LINE, PART, ZERO_POINT, QuantizedWeight


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


def byte_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product of a weight with ``byte_inputs``: one part of one row at a time, rounded by Python, summed
    as 64-bit integers, then float32 step by step."""
    plain = weight.by_rows(0, weight.rows)
    codes = plain.codes[:weight.rows, :weight.columns].long() - ZERO_POINT[8]
    rows = x.reshape(-1, weight.columns).float()
    out = torch.zeros(rows.shape[0], weight.rows)
    for index, row in enumerate(rows):
        for first in range(0, weight.columns, PART):
            part = row[first:first + PART]
            reach = part.abs().max()
            if not bool(part.isfinite().all()):
                out[index] = torch.nan
            elif reach >= 1e-30:
                up = torch.tensor(127.0) / reach
                whole = torch.tensor([round(number) for number in (part * up).tolist()])
                sums = (codes[:, first:first + PART] @ whole).float()
                scales = plain.scales[:weight.rows, first // weight.group] * (reach / 127)
                out[index] = out[index] + sums * scales
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.rows)
