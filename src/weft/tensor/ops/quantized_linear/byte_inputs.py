"""quantized_linear of weights with ``byte_inputs``, in torch: int8 times int8 on every machine.

    x      each row in parts of 128 columns: codes -127..127, to nearest even, and a scale, largest / 127
    sum    of a part: a whole number below 2^24, so float32 makes it exactly, in whatever order
    y      sum * (scale of the weight * scale of x), part after part, then the bias: each step rounded

The C++ kernel (csrc/w8a8.inl) computes the same steps and gives the same bits. This path serves where that
kernel is off or not built; on GPUs ``byte_kernels`` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor.weights.quantized import PART, TILE_ROWS, ZERO_POINT, QuantizedWeight

LEAST = 1e-30
"""A part with a smaller largest number counts as zeros: its scale would underflow float32."""
_BLOCK_ELEMENTS = 1 << 20


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None,
                     ) -> torch.Tensor:
    codes_PRK, scales_PR = rounded_inputs(x.reshape(-1, weight.columns))
    out = scales_PR.new_empty(scales_PR.shape[1], weight.rows)
    step = max(TILE_ROWS, _BLOCK_ELEMENTS // max(weight.columns, 1) // TILE_ROWS * TILE_ROWS)
    for first in range(0, weight.rows, step):
        last = min(first + step, weight.rows)
        block = weight.by_rows(first, last)
        values = (block.codes[:last - first].float() - ZERO_POINT[8])[:, :weight.columns]
        values_NPK = in_parts(values)
        total = out[:, first:last].zero_()
        for part, (codes, scales) in enumerate(zip(codes_PRK, scales_PR, strict=True)):
            both = block.scales[:last - first, part * PART // weight.group] * scales[:, None]
            total += (codes @ values_NPK[:, part].T).mul_(both)
    return (out if bias is None else out.add_(bias)).to(x.dtype).view(*x.shape[:-1], weight.rows)


def rounded_inputs(x_RI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [parts, R, 128] and scales [parts, R], both float32. A part with a non-finite number has codes 0
    and a scale of NaN."""
    x_PRK = in_parts(x_RI.float()).transpose(0, 1)
    reach = x_PRK.abs().amax(-1, keepdim=True)
    finite = reach.isfinite()      # the maximum of numbers with a NaN is NaN
    some = finite & (reach >= LEAST)
    up = torch.full_like(reach, 127).div_(reach)       # torch computes 127 / reach through 1 / reach
    codes = torch.where(some, (x_PRK * up).round_(), 0)
    scales = torch.where(some, reach / 127, torch.where(finite, 0.0, torch.nan))
    return codes, scales.squeeze(-1)


def in_parts(x_RI: torch.Tensor) -> torch.Tensor:
    """[R, columns] -> [R, parts, 128], zeros behind."""
    parts = -(-x_RI.shape[1] // PART)
    return F.pad(x_RI, (0, parts * PART - x_RI.shape[1])).view(x_RI.shape[0], parts, PART)
