"""conv_and_gates in Triton: the convolution of a gated delta net and its gates, one launch for a step of only decodes.

    a program: (block of channels, run)   the output, and the window moved on        ``causal_conv.move_run``
               (the block after, run)     g and beta of the run's token              ``delta_gates.gates_of_token``

No number of either is an input of the other. Each is computed by the same operations as in a launch of its own, one
number for itself, so no bit of it changes. In a step with prompts the two have separate launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor import gpu
from weft.tensor.gpu.launch import STEP_TABLES, dense_rows, launch
from weft.tensor.gpu.products import after_previous
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs
from weft.tensor.kernels.causal_conv import ROWS, move_run
from weft.tensor.kernels.delta_gates import gates_of_token
from weft.tensor.op import UNFIT, Unfit
from weft.tensor.ops.recurrent_layers import GatedDeltaWeights


@triton.jit(do_not_specialize=["decode_count"], do_not_specialize_on_alignment=STEP_TABLES)
def _rows_and_gates(
    x,
    weight,
    window,
    out,
    slots,
    fresh,
    offsets,
    lengths,
    a,
    dt_bias,
    rates,
    b,
    g,
    beta,
    x_row,
    slot_stride,
    a_row,
    b_row,
    decode_count,
    beta_scale,
    C: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BC: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute decodes. Grid: blocks of C channels and one program more, runs. ``x``, ``weight``, ``window``, ``out``
    and the tables as for ``causal_conv._rows``; ``a``, ``b`` [T, H] by row strides, ``dt_bias``, ``rates`` float32 [H],
    ``g``, ``beta`` float32 [T, H].
    """
    after_previous(PDL)
    block, run = tl.program_id(0), tl.program_id(1)
    if block < tl.cdiv(C, BC):
        move_run(
            x,
            x,
            x,
            weight,
            weight,
            window,
            out,
            slots,
            fresh,
            offsets,
            lengths,
            x_row,
            x_row,
            x_row,
            slot_stride,
            decode_count,
            run,
            block,
            C,
            W,
            WP,
            BC,
            False,
            True,
            False,
        )
    else:
        gates_of_token(
            a, dt_bias, rates, b, g, beta, a_row, b_row, beta_scale, 0.0, run.to(tl.int64), 0, H, H, HP, HP, False
        )


def conv_and_gates(
    qkv_TC: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: GatedDeltaWeights,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | Unfit:
    decodes = runs.decode_count
    if not gpu.joins(qkv_TC.device) or runs.log is not None or not 0 < decodes == runs.run_count == qkv_TC.shape[0]:
        return UNFIT
    w, step, channels, heads = weights, device_runs(runs), qkv_TC.shape[1], a_TH.shape[1]
    qkv_TC, a_TH, b_TH = dense_rows(qkv_TC), dense_rows(a_TH), dense_rows(b_TH)
    out_TC = torch.empty((decodes, channels), dtype=qkv_TC.dtype, device=qkv_TC.device)
    g_TH, beta_TH = (torch.empty((decodes, heads), dtype=torch.float32, device=qkv_TC.device) for _ in range(2))
    launch(_rows_and_gates, (triton.cdiv(channels, ROWS.width) + 1, decodes))(
        qkv_TC,
        w.conv_CK.contiguous(),
        window_SCW,
        out_TC,
        runs.slots_R,
        step.fresh_R,
        step.offsets_R,
        step.lengths_R,
        a_TH,
        w.dt_bias_H,
        w.decay_H,
        b_TH,
        g_TH,
        beta_TH,
        qkv_TC.stride(0),
        window_SCW.stride(0),
        a_TH.stride(0),
        b_TH.stride(0),
        decodes,
        w.shape.beta_scale,
        C=channels,
        W=window_SCW.shape[2],
        WP=triton.next_power_of_2(window_SCW.shape[2]),
        BC=ROWS.width,
        H=heads,
        HP=triton.next_power_of_2(heads),
        num_warps=ROWS.warps,
    )
    return out_TC, g_TH, beta_TH
