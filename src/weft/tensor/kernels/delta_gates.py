"""delta_gates in Triton: one launch instead of seven.

    a program: (token, block of columns)     its columns of g; the first block also the heads of beta

A decode step of 48 gated-delta layers has 288 launches fewer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import Blocks, dense_rows, launch
from weft.tensor.gpu.products import sigmoid, softplus

COLUMNS = Blocks(1024)


@triton.jit
def gates_of_token(
    a,
    bias,
    decay,
    b,
    g,
    beta,
    a_row,
    b_row,
    beta_scale,
    floor,
    t,
    block,
    C: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    BC: tl.constexpr,
    FLOORED: tl.constexpr,
):
    """Write ``g`` of token ``t`` in one ``block`` of columns, and with the first block its ``beta``."""
    column, head = block * BC + tl.arange(0, BC), tl.arange(0, HP)
    inside = column < C
    steps = tl.load(a + t * a_row + column, mask=inside, other=0.0).to(tl.float32)
    steps += tl.load(bias + column, mask=inside, other=0.0)
    of_head = tl.load(decay + column // (C // H), mask=inside, other=0.0)
    if FLOORED:
        log_decay = sigmoid(-(of_head * steps)) * floor
    else:
        log_decay = of_head * softplus(steps)
    tl.store(g + t * C + column, log_decay, mask=inside)
    if block == 0:
        size = sigmoid(tl.load(b + t * b_row + head, mask=head < H, other=0.0).to(tl.float32))
        tl.store(beta + t * H + head, size * beta_scale, mask=head < H)


@triton.jit
def _gates(
    a,
    bias,
    decay,
    b,
    g,
    beta,
    a_row,
    b_row,
    beta_scale,
    floor,
    C: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    BC: tl.constexpr,
    FLOORED: tl.constexpr,
):
    """Write ``g`` float32 [T, C] and ``beta`` float32 [T, H]. Grid: tokens, blocks of columns. ``a`` [T, C] by
    ``a_row``, ``b`` [T, H] by ``b_row``; ``bias`` float32 [C], ``decay`` float32 [H].
    """
    gates_of_token(
        a,
        bias,
        decay,
        b,
        g,
        beta,
        a_row,
        b_row,
        beta_scale,
        floor,
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        C,
        H,
        HP,
        BC,
        FLOORED,
    )


def delta_gates(
    a_TC: torch.Tensor,
    bias_C: torch.Tensor,
    decay_H: torch.Tensor,
    b_TH: torch.Tensor,
    *,
    beta_scale: float = 1.0,
    floor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, columns), heads = a_TC.shape, decay_H.shape[0]
    a_TC, b_TH = dense_rows(a_TC), dense_rows(b_TH)
    g_TC, beta_TH = (
        torch.empty((tokens, width), dtype=torch.float32, device=a_TC.device) for width in (columns, heads)
    )
    if tokens:
        width = min(COLUMNS.width, triton.next_power_of_2(columns))
        launch(_gates, (tokens, triton.cdiv(columns, width)))(
            a_TC,
            bias_C,
            decay_H,
            b_TH,
            g_TC,
            beta_TH,
            a_TC.stride(0),
            b_TH.stride(0),
            beta_scale,
            floor or 0.0,
            C=columns,
            H=heads,
            HP=triton.next_power_of_2(heads),
            BC=width,
            FLOORED=floor is not None,
            num_warps=COLUMNS.warps,
        )
    return g_TC, beta_TH
