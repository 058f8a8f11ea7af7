"""The norms in Triton: a program normalises some groups of numbers and reads each number once.

    x [rows, heads, D], any strides        groups of D, or of ``group_size``
    program = ROWS x BLOCK numbers         BLOCK: a group, padded to a power of two; about 4096 in all

Everything is float32 until the one rounding of the result. ``add_norm`` has a program for each row: it stores
the sum and normalises it from registers. It can sum a product's split columns first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import dense_rows, launch
from weft.tensor.gpu.products import after_previous, sum_of_splits
from weft.tensor.op import UNFIT, Unfit
from weft.units import ceil_div

AT_ONCE = 4096
"""Numbers that a program normalises, unless one group is larger."""


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
    dim = x.shape[-1]
    group = group_size or dim
    assert dim % group == 0, f"groups of {group} do not divide {dim}"
    assert weight.shape == (dim,)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    assert gate is None or gate.shape == x.shape
    wide, gates = _three(dense_rows(x)), None if gate is None else _three(dense_rows(gate))
    units = x.numel() // group
    rows, block, warps = sizes(group)
    launch(_norm, (ceil_div(units, rows),))(
        wide,
        wide.stride(0),
        wide.stride(1),
        gates,
        0 if gates is None else gates.stride(0),
        0 if gates is None else gates.stride(1),
        weight.contiguous(),
        eps,
        out,
        units,
        wide.shape[1],
        DIM=dim,
        GROUP=group,
        BLOCK=block,
        ROWS=rows,
        PLUS_ONE=plus_one,
        GATE_FIRST=gate_first,
        num_warps=warps,
    )
    return out


def sizes(group: int) -> tuple[int, int, int]:
    """Return (groups of a program, its width, warps)."""
    block = 1 << (group - 1).bit_length()
    return max(1, min(16, AT_ONCE // block)), block, 4 if block <= AT_ONCE else min(16, 4 * block // AT_ONCE)


def _three(x: torch.Tensor) -> torch.Tensor:
    if x.ndim == 3:
        return x
    return x[:, None] if x.ndim == 2 else x.reshape(-1, 1, x.shape[-1])


@triton.jit
def normed(x, weight, eps, GROUP: tl.constexpr, PLUS_ONE: tl.constexpr):
    """Return the norm, float32 [N, BLOCK], zeros beyond GROUP; ``weight`` [BLOCK] or [N, BLOCK]."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) / GROUP + eps)
    if PLUS_ONE:
        weight += 1.0
    return x * inverse[:, None] * weight


@triton.jit(do_not_specialize=["units"])
def _norm(
    x,
    x_row,
    x_head,
    gate,
    gate_row,
    gate_head,
    weight,
    eps,
    out,
    units,
    heads,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalise ROWS groups of GROUP numbers. Grid: blocks of the ``units`` groups.

    ``x`` and ``gate`` (or None) [rows, heads, DIM] by strides in elements; ``weight`` [DIM]; ``out`` dense, of the
    shape of ``x``. ``gate`` is a factor silu(gate), before the norm with GATE_FIRST.
    """
    after_previous(PDL)
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = unit % (DIM // GROUP) * GROUP
    head, row = unit // (DIM // GROUP) % heads, unit // (DIM // GROUP) // heads
    d = tl.arange(0, BLOCK)[None, :]
    mask = (unit < units)[:, None] & (d < GROUP)
    wide = tl.load(x + (row * x_row + head * x_head + place)[:, None] + d, mask=mask, other=0.0)
    wide = wide.to(tl.float32)
    if gate is not None:
        by = tl.load(gate + (row * gate_row + head * gate_head + place)[:, None] + d, mask=mask, other=0.0)
        by = by.to(tl.float32)
        by *= tl.sigmoid(by)
        if GATE_FIRST:
            wide *= by
    factor = tl.load(weight + place[:, None] + d, mask=mask, other=0.0).to(tl.float32)
    wide = normed(wide, factor, eps, GROUP, PLUS_ONE)
    if gate is not None and not GATE_FIRST:
        wide *= by
    tl.store(out + (unit * GROUP)[:, None] + d, wide.to(out.dtype.element_ty), mask=mask)


def add_norm(
    x_TD: torch.Tensor,
    y_TD: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scale: float = 1.0,
    plus_one: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | Unfit:
    parts = None
    if y_TD.ndim == 3:
        parts, y_TD = y_TD.contiguous(), torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if not (
        x_TD.ndim == 2
        and x_TD.dtype == y_TD.dtype
        and x_TD.shape == y_TD.shape
        and x_TD.stride(1) == 1
        and y_TD.stride(1) == 1
    ):
        return UNFIT
    tokens, dim = x_TD.shape
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if tokens:
        _, block, warps = sizes(dim)
        launch(_add, (tokens,))(
            x_TD,
            x_TD.stride(0),
            y_TD,
            y_TD.stride(0),
            parts,
            0 if parts is None else parts.stride(0),
            scale,
            weight.contiguous(),
            eps,
            out_TD,
            DIM=dim,
            BLOCK=block,
            SCALED=scale != 1.0,
            PLUS_ONE=plus_one,
            PARTS=0 if parts is None else parts.shape[0],
            num_warps=warps,
        )
    return y_TD, out_TD


@triton.jit
def _add(
    x,
    x_row,
    y,
    y_row,
    parts,
    part_stride,
    scale,
    weight,
    eps,
    out,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a row of ``x`` to ``y``, in place, and store the norm of the sum in ``out``. Grid: rows.

    ``x``, ``y`` [T, DIM] by row strides; ``weight`` [DIM]; ``out`` [T, DIM] dense. SCALED: ``y`` is first
    multiplied by ``scale`` and rounded. PARTS: ``y`` is the rounded sum of as many ``parts`` float32 [PARTS, T, DIM],
    and only written.
    """
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < DIM
    y += row * y_row + d
    if PARTS > 0:
        total = sum_of_splits(parts, part_stride, row * DIM + d, mask, PARTS)
        added = total.to(y.dtype.element_ty).to(tl.float32)
    else:
        added = tl.load(y, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        added = (added * scale).to(y.dtype.element_ty).to(tl.float32)
    added += tl.load(x + row * x_row + d, mask=mask, other=0.0).to(tl.float32)
    # The sum is rounded before the norm reads it, as the torch form does.
    stored = added.to(y.dtype.element_ty)
    tl.store(y, stored, mask=mask)
    factor = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    normed_row = normed(stored.to(tl.float32)[None, :], factor[None, :], eps, DIM, PLUS_ONE)
    tl.store(out + row * DIM + d[None, :], normed_row.to(out.dtype.element_ty), mask=mask[None, :])
