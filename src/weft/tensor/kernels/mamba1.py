"""mamba1 by Triton: the recurrence for decodes, for prefills the recurrence of all chunks in parallel.

    recurrent   a program: (block of channels, run)      token by token from the slot
    scan ENDS   a program: (block of channels, chunk)    L: the state after a chunk that begins at zero
    link        a program: (block of channels, run)      S_(c+1) = exp(A sum d) S_c + L_c by chunk; taps
    scan        a program: (block of channels, chunk)    the recurrence again, from S_c: outputs

These are the three lines of the torch form (``ops.mamba1``). A long prompt takes 64 steps for all of its
chunks at once, not thousands one after the other, and computes the arithmetic twice. S_c overwrites L_c.

Prefills of states in few bits use the recurrence in models of float32: those states are rounded after every token
(``tensor.rounding``). In models of 16 bits ``link`` rounds them after each chunk (decision 0081).

PAD slots are neither read nor written, fresh slots not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import STEP_TABLES, Blocks, dense_rows, launch
from weft.tensor.gpu.products import decay_of, rounded, softplus
from weft.tensor.gpu.recurrence import launch_by_token, load_slot, position_shift, store_slot
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs

CHANNELS = Blocks(64)
"""Blocks of every kernel here: 64 channels of N = 16 are 8 entries of the state a thread, as are those of N = 8."""


@triton.jit
def _advance(s, step, x_t, b, t, col, rates, b_row, N: tl.constexpr):
    """Return ``s`` [channels, N] after a token of step sizes ``step`` [channels]."""
    b_t = tl.load(b + t * b_row + col, mask=col < N, other=0.0).to(tl.float32)
    return s * decay_of(step[:, None] * rates) + (x_t * step)[:, None] * b_t[None, :]


@triton.jit
def _read_out(s, x_t, c, out, t, channel, col, d, c_row, C: tl.constexpr, N: tl.constexpr):
    c_t = tl.load(c + t * c_row + col, mask=col < N, other=0.0).to(tl.float32)
    y_t = tl.sum(s * c_t[None, :], axis=1) + d * x_t
    tl.store(out + t * C + channel, y_t.to(out.dtype.element_ty), mask=channel < C)


@triton.jit
def _token(x, dt, bias, t, channel, x_row, dt_row, C: tl.constexpr):
    """Return the step sizes and inputs [channels] of token ``t``; zeros beyond the last channel."""
    step = softplus(tl.load(dt + t * dt_row + channel, mask=channel < C, other=0.0).to(tl.float32) + bias)
    return step, tl.load(x + t * x_row + channel, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit
def added(total, rest, term):
    """Return ``total`` with one more term, and the sum of its rounding errors. Totals and terms are 0 or more."""
    # Instead of float64, which runs at 1/64 of float32's rate on consumer GPUs.
    whole = total + term
    return whole, rest + tl.where(total >= term, (total - whole) + term, (term - whole) + total)


@triton.jit
def _of_channels(A, D, dt_bias, channel, col, C: tl.constexpr, N: tl.constexpr):
    """Return A [channels, N], D and the bias of step sizes [channels], float32."""
    mask = (channel < C)[:, None] & (col < N)[None, :]
    rates = tl.load(A + channel[:, None] * N + col[None, :], mask=mask, other=0.0).to(tl.float32)
    d = tl.load(D + channel, mask=channel < C, other=0.0).to(tl.float32)
    return rates, d, tl.load(dt_bias + channel, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first_run", "layer"], do_not_specialize_on_alignment=STEP_TABLES)
def _recurrent(
    x,
    dt,
    A,
    b,
    c,
    D,
    dt_bias,
    out,
    state,
    slots,
    starts,
    fresh,
    chunk_begin,
    chunk_first,
    chunk_tokens,
    chunk_tap,
    x_row,
    dt_row,
    b_row,
    c_row,
    slot_stride,
    first_run,
    layer,
    C: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BC: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """Run the recurrence. Grid: blocks of channels, runs from ``first_run`` on. Token t of a decode run is t = run.

    ``x``, ``dt`` [T, C] and ``b``, ``c`` [T, N] by row strides; ``A`` [C, N]; ``D``, ``dt_bias`` [C]; ``out`` [T, C];
    ``state`` [slots, C, N] with ``slot_stride``; ``slots``, ``starts`` int64 [R]; ``fresh`` and the ``chunk_*`` tables
    int32, of ``gpu.runs``.
    """
    run = first_run + tl.program_id(1)
    channel, col = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, NP)
    element = channel[:, None] * N + col[None, :]
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    s = load_slot(state, element, slot, slot_stride, tl.load(fresh + run), channel, C, col < N)
    rates, d, bias = _of_channels(A, D, dt_bias, channel, col, C, N)
    position = tl.load(starts + run)
    if PREFILL:
        begin = tl.load(chunk_begin + run)
        run_first = tl.load(chunk_first + begin).to(tl.int64)
        for chunk in range(begin, tl.load(chunk_begin + run + 1)):
            first = tl.load(chunk_first + chunk)
            for entry in range(first, first + tl.load(chunk_tokens + chunk)):
                index = entry - run_first
                t = run_first + index
                step, x_t = _token(x, dt, bias, t, channel, x_row, dt_row, C)
                s = _advance(s, step, x_t, b, t, col, rates, b_row, N)
                _read_out(s, x_t, c, out, t, channel, col, d, c_row, C, N)
                s = rounded(s, dtype, element, position + index, layer)
            tap = tl.load(chunk_tap + chunk).to(tl.int64)
            store_slot(s, state, element, tap, slot_stride, channel, C, col < N)
    else:
        step, x_t = _token(x, dt, bias, run, channel, x_row, dt_row, C)
        s = _advance(s, step, x_t, b, run, col, rates, b_row, N)
        _read_out(s, x_t, c, out, run, channel, col, d, c_row, C, N)
        s = rounded(s, dtype, element, position, layer)
    store_slot(s, state, element, slot, slot_stride, channel, C, col < N)


@triton.jit(do_not_specialize_on_alignment=STEP_TABLES)
def _scan(
    x,
    dt,
    A,
    b,
    c,
    D,
    dt_bias,
    out,
    begins,
    steps,
    chunk_first,
    chunk_tokens,
    x_row,
    dt_row,
    b_row,
    c_row,
    C: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BC: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Run the recurrence of a chunk. Grid: blocks of channels, chunks. ENDS: writes ``begins`` [chunks, C, N], the
    state after a chunk that began at zero, and ``steps`` [chunks, C], its sum of step sizes. Else reads ``begins``,
    the state before the chunk. Other arguments as for ``_recurrent``.
    """
    chunk = tl.program_id(1).to(tl.int64)
    channel, col = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, NP)
    state = begins + chunk * (C * N) + channel[:, None] * N + col[None, :]
    mask = (channel < C)[:, None] & (col < N)[None, :]
    rates, d, bias = _of_channels(A, D, dt_bias, channel, col, C, N)
    first = tl.load(chunk_first + chunk).to(tl.int64)
    total, rest = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    if ENDS:
        s = tl.zeros((BC, NP), tl.float32)
    else:
        s = tl.load(state, mask=mask, other=0.0)
    for index in range(tl.load(chunk_tokens + chunk)):
        t = first + index
        step, x_t = _token(x, dt, bias, t, channel, x_row, dt_row, C)
        s = _advance(s, step, x_t, b, t, col, rates, b_row, N)
        if ENDS:
            total, rest = added(total, rest, step)
        else:
            _read_out(s, x_t, c, out, t, channel, col, d, c_row, C, N)
    if ENDS:
        tl.store(state, s, mask=mask)
        tl.store(steps + chunk * C + channel, total + rest, mask=channel < C)


@triton.jit(do_not_specialize=["first_run", "layer"], do_not_specialize_on_alignment=STEP_TABLES)
def _link(
    A,
    begins,
    steps,
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
    C: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BC: tl.constexpr,
):
    """Link the chunks of a run. Grid: blocks of channels, prefill runs. ``begins``: in, the states after chunks that
    begin at zero; out, the states before the chunks. A state in few bits is rounded after each chunk.
    """
    run = first_run + tl.program_id(1)
    channel, col = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, NP)
    element = channel[:, None] * N + col[None, :]
    mask = (channel < C)[:, None] & (col < N)[None, :]
    slot = tl.load(slots + run)
    s = load_slot(state, element, slot, slot_stride, tl.load(fresh + run), channel, C, col < N)
    rates = tl.load(A + element, mask=mask, other=0.0).to(tl.float32)
    shift = position_shift(starts, run, chunk_begin, chunk_first)
    for chunk in range(tl.load(chunk_begin + run), tl.load(chunk_begin + run + 1)):
        addresses = begins + chunk * (C * N) + element
        end = tl.load(addresses, mask=mask, other=0.0)
        tl.store(addresses, s, mask=mask)
        step = tl.load(steps + chunk * C + channel, mask=channel < C, other=0.0)
        s = s * decay_of(step[:, None] * rates) + end
        last = tl.load(chunk_first + chunk) + tl.load(chunk_tokens + chunk) - 1
        s = rounded(s, state.dtype.element_ty, element, shift + last, layer)
        tap = tl.load(chunk_tap + chunk).to(tl.int64)
        store_slot(s, state, element, tap, slot_stride, channel, C, col < N)
    store_slot(s, state, element, slot, slot_stride, channel, C, col < N)


def mamba1(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    A_CN: torch.Tensor,
    B_TN: torch.Tensor,
    C_TN: torch.Tensor,
    D_C: torch.Tensor,
    dt_bias_C: torch.Tensor,
    state_SCN: torch.Tensor,
    runs: Runs,
    *,
    layer: int = 0,
) -> torch.Tensor:
    tokens, channels = x_TC.shape
    x_TC, dt_TC, B_TN, C_TN = (dense_rows(x) for x in (x_TC, dt_TC, B_TN, C_TN))
    out_TC = torch.empty((tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    step = device_runs(runs)
    A_CN = A_CN.contiguous()
    inputs = (x_TC, dt_TC, A_CN, B_TN, C_TN, D_C.contiguous(), dt_bias_C.contiguous(), out_TC)
    rows = (x_TC.stride(0), dt_TC.stride(0), B_TN.stride(0), C_TN.stride(0))
    width = A_CN.shape[1]
    sizes = {
        "C": channels,
        "N": width,
        "NP": triton.next_power_of_2(width),
        "BC": CHANNELS.width,
        "num_warps": CHANNELS.warps,
    }
    blocks, prefills = triton.cdiv(channels, CHANNELS.width), step.run_count - step.decode_count
    if launch_by_token(_recurrent, (blocks,), inputs, state_SCN, runs, rows, layer, chunked=True, **sizes):
        return out_TC
    begins = torch.empty((step.chunk_count, channels, width), dtype=torch.float32, device=x_TC.device)
    steps = torch.empty((step.chunk_count, channels), dtype=torch.float32, device=x_TC.device)
    chunks = (step.chunk_first_C, step.chunk_tokens_C)
    launch(_scan, (blocks, step.chunk_count))(*inputs, begins, steps, *chunks, *rows, **sizes, ENDS=True)
    launch(_link, (blocks, prefills))(
        A_CN,
        begins,
        steps,
        state_SCN,
        runs.slots_R,
        runs.starts_R,
        step.fresh_R,
        step.chunk_begin_R,
        *chunks,
        step.chunk_tap_C,
        state_SCN.stride(0),
        step.decode_count,
        layer,
        **sizes,
    )
    launch(_scan, (blocks, step.chunk_count))(*inputs, begins, steps, *chunks, *rows, **sizes, ENDS=False)
    return out_TC
