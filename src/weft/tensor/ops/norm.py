"""Root-mean-square norms: plain, gated, and of a residual stream after an addition (csrc/norm.hpp)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.op import UNFIT, Unfit, op
from weft.tensor.ops.elementwise import sum_in_order

_NO_GATE = (0, 0, 0, 0)


@op("weft.tensor.kernels.norm")
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    gate: torch.Tensor | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
) -> torch.Tensor:
    """Normalise the last dim: ``x / sqrt(mean(x^2) + eps) * weight``.

    ``x``: [..., D] of any float dtype; ``weight``: [D]; returns the shape and dtype of ``x``. Sums are
    float32. ``plus_one``: the factor is ``1 + weight``, applied before rounding (Qwen3.5). ``gate`` [..., D]:
    a factor ``silu(gate)``, after the norm (Qwen3.5's gated norm) or, with ``gate_first``, before it
    (Mamba-2, Granite-4-H). ``group_size``: the mean is over groups of ``group_size`` neighbours of the last
    dim instead of all of it; must divide D.

    Source: Zhang and Sennrich, 2019; the norms of transformers' qwen3_5 and granitemoehybrid.
    """
    wide = x.float()
    if gate is not None and gate_first:
        wide = wide * F.silu(gate.float())
    groups = torch.unflatten(wide, -1, (-1, group_size)) if group_size else wide
    # The norm squared, for the mean of squares: it reads the values once and makes no copy of them.
    norms: torch.Tensor = torch.linalg.vector_norm(groups, dim=-1, keepdim=True)
    inverse = norms.square_().div_(groups.shape[-1]).add_(eps).rsqrt_()
    normed = (groups * inverse).reshape(x.shape)
    if plus_one:
        # Qwen3.5 multiplies in float32 and rounds once.
        out: torch.Tensor = normed.mul_(1.0 + weight.float()).to(x.dtype)
    else:
        out = normed.to(x.dtype).mul_(weight)  # transformers rounds before the factor
    if gate is not None and not gate_first:
        out = (out.float() * F.silu(gate.float())).to(x.dtype)
    return out


@rms_norm.in_cpp
def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    gate: torch.Tensor | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
) -> torch.Tensor | Unfit:
    dim = x.shape[-1]
    group = group_size or dim
    if not (
        native.fits(x)
        and weight.dtype in native.DTYPES
        and 2 <= x.ndim <= 3
        and x.stride(-1) == 1
        and group % native.LANES == 0
        and (gate is None or (gate.dtype == x.dtype and gate.shape == x.shape and gate.stride(-1) == 1))
    ):
        return UNFIT
    assert dim % group == 0, f"groups of {group} do not divide {dim}"
    assert weight.shape == (dim,)
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x if x.ndim == 3 else x[:, None]
    gates = _NO_GATE if gate is None else native.rows_of(gate if gate.ndim == 3 else gate[:, None])
    native.extension().norm(
        native.rows_of(rows),
        gates,
        *native.weight_of(weight),
        eps,
        plus_one,
        gate_first,
        rows.shape[0],
        rows.shape[1],
        dim,
        group,
        out.data_ptr(),
    )
    return out


def finished(y_TD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [T, D] of ``dtype``: ``y_TD``, or the sum of the parts of a product, float32 [splits, T, D]
    (``kernels.dense_linear.parts_of``), first part first and rounded once.
    """
    return sum_in_order(y_TD).to(dtype) if y_TD.ndim == 3 else y_TD


@op("weft.tensor.kernels.norm")
def add_norm(
    x_TD: torch.Tensor,
    y_TD: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scale: float = 1.0,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + scale y`` and its ``rms_norm``, both [T, D] in the dtype of ``x_TD``, to which the product and
    the sum are rounded. The sum overwrites ``y_TD``; ``x_TD`` is not changed. ``y_TD`` may be unfinished
    (``finished``).
    """
    y_TD = finished(y_TD, x_TD.dtype)
    sum_TD = (y_TD if scale == 1.0 else y_TD.mul_(scale)).add_(x_TD)
    return sum_TD, rms_norm(sum_TD, weight, eps, plus_one=plus_one)


@add_norm.in_cpp
def _add_norm(
    x_TD: torch.Tensor,
    y_TD: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scale: float = 1.0,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | Unfit:
    dim = x_TD.shape[-1]
    if not (
        native.fits(x_TD, y_TD)
        and y_TD.ndim == 2
        and weight.dtype in native.DTYPES
        and x_TD.shape == y_TD.shape
        and x_TD.stride(-1) == 1
        and y_TD.is_contiguous()
        and dim % native.LANES == 0
    ):
        return UNFIT
    assert weight.shape == (dim,)
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    native.extension().add_norm(
        native.projected_of(x_TD),
        native.projected_of(y_TD),
        scale,
        dim,
        y_TD.data_ptr(),
        (*native.weight_of(weight), eps),
        plus_one,
        out_TD.data_ptr(),
    )
    return y_TD, out_TD
