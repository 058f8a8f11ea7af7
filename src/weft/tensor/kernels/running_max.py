"""running_max by Triton: each program goes through the tokens of one run, with all heads in registers.

A token takes one addition and one comparison, and their inputs can be loaded ahead. So even the tokens of a long
prompt, one after the other, take less time than the products around them. PAD slots are neither read nor written,
fresh slots not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import STEP_TABLES, Blocks, padded
from weft.tensor.gpu.products import only_if, rounded
from weft.tensor.gpu.recurrence import launch_by_token
from weft.tensor.inputs import Runs

HEADS = Blocks(16, warps=1)


@triton.jit
def _token(m, log_decay, x, out, t, head, H: tl.constexpr):
    faded = m + tl.load(log_decay + t * H + head, mask=head < H, other=0.0).to(tl.float32)
    x_t = tl.load(x + t * H + head, mask=head < H, other=0.0).to(tl.float32)
    m = tl.maximum(faded, x_t, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + t * H + head, m.to(out.dtype.element_ty), mask=head < H)
    return m


@triton.jit(do_not_specialize=["first_run", "layer"], do_not_specialize_on_alignment=STEP_TABLES)
def _running_max(
    log_decay,
    x,
    out,
    state,
    slots,
    starts,
    fresh,
    chunk_begin,
    chunk_first,
    chunk_tokens,
    chunk_tap,
    slot_stride,
    first_run,
    layer,
    H: tl.constexpr,
    HP: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """Run the recurrence. Grid: runs from ``first_run`` on. Token t of a decode run is t = run. ``log_decay``, ``x``,
    ``out`` [T, H]; ``state`` [slots, 1, H] with ``slot_stride``; ``slots``, ``starts`` int64 [R]; ``fresh`` and the
    ``chunk_*`` tables int32, of ``gpu.runs``.
    """
    run, head = first_run + tl.program_id(0), tl.arange(0, HP)
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    live = (slot >= 0) & (tl.load(fresh + run) == 0)
    m = tl.load(state + slot * slot_stride + head, mask=head < only_if(live, H), other=0.0).to(tl.float32)
    position = tl.load(starts + run)
    if PREFILL:
        begin = tl.load(chunk_begin + run)
        run_first = tl.load(chunk_first + begin).to(tl.int64)
        for chunk in range(begin, tl.load(chunk_begin + run + 1)):
            first = tl.load(chunk_first + chunk)
            for t in range(first, first + tl.load(chunk_tokens + chunk)):
                index = t - run_first
                m = _token(m, log_decay, x, out, run_first + index, head, H)
                m = rounded(m, dtype, head, position + index, layer)
            tap = tl.load(chunk_tap + chunk).to(tl.int64)
            tl.store(state + tap * slot_stride + head, m.to(dtype), mask=head < only_if(tap >= 0, H))
    else:
        m = rounded(_token(m, log_decay, x, out, run, head, H), dtype, head, position, layer)
    tl.store(state + slot * slot_stride + head, m.to(dtype), mask=head < only_if(slot >= 0, H))


def running_max(
    log_decay_TH: torch.Tensor, x_TH: torch.Tensor, state_S1H: torch.Tensor, runs: Runs, *, layer: int = 0
) -> torch.Tensor:
    log_decay_TH, x_TH = log_decay_TH.contiguous(), x_TH.contiguous()
    out_TH, heads = torch.empty_like(x_TH), x_TH.shape[1]
    launch_by_token(
        _running_max,
        (),
        [log_decay_TH, x_TH, out_TH],
        state_S1H,
        runs,
        [],
        layer,
        H=heads,
        HP=padded(heads),
        num_warps=HEADS.warps,
        num_stages=HEADS.stages,
    )
    return out_TH
