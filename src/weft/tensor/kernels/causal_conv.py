"""causal_conv by Triton, and short_conv, whose two gates are fused into its loads and stores.

    tokens   a program: (block of channels, chunk)   outputs of prefills, and the windows of taps
    rows     a program: (block of channels, run)     decodes: the output, and the window moved on in its slot;
                                                     prefills: the window that the run leaves

    seen by token i of a run, oldest first          W = K - 1
        i < W     window[i], ..., window[W-1], x[0], ..., x[i]
        else      x[i-W], ..., x[i]

Each input is loaded K times, all but once from the cache. A channel's weights are K neighbours in memory and loaded at
once: loaded one by one, they took four times the loads of the inputs. Sums are float32. PAD slots are neither read nor
written, fresh slots not read.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import STEP_TABLES, Blocks, dense_rows, launch
from weft.tensor.gpu.products import only_if
from weft.tensor.gpu.runs import device_runs
from weft.tensor.inputs import Runs
from weft.tensor.state_rows import restored
from weft.units import CHUNK_TOKENS

PLACES = tl.constexpr(CHUNK_TOKENS)
TOKENS = Blocks(64)
ROWS = Blocks(256)


@triton.jit
def _input(x, gate, t, channel, mask, x_row, gate_row, GATED: tl.constexpr):
    """Return the input that the window stores: x, or gate x rounded to the dtype of x."""
    seen = tl.load(x + t * x_row + channel, mask=mask, other=0.0)
    if GATED:
        factor = tl.load(gate + t * gate_row + channel, mask=mask, other=0.0)
        seen = (seen.to(tl.float32) * factor.to(tl.float32)).to(x.dtype.element_ty)
    return seen.to(tl.float32)


@triton.jit
def _weights(weight, channel, within, W: tl.constexpr, KP: tl.constexpr):
    """Return float32 [channels, KP], zeros beyond W + 1."""
    k = tl.arange(0, KP)[None, :]
    return tl.load(weight + channel[:, None] * (W + 1) + k, mask=within[:, None] & (k <= W), other=0.0).to(tl.float32)


@triton.jit
def _weight(weights, k: tl.constexpr, KP: tl.constexpr):
    """Return column ``k`` of the weights, [channels]."""
    return tl.sum(tl.where(tl.arange(0, KP)[None, :] == k, weights, 0.0), 1)


@triton.jit
def _output(
    out,
    y,
    after,
    bias,
    t,
    channel,
    within,
    mask,
    after_row,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    """Store ``y`` of token ``t``, one token or a column of tokens; ``within``: the mask of only channels."""
    if BIAS:
        y += tl.load(bias + channel, mask=within, other=0.0).to(tl.float32)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    if GATED:
        factor = tl.load(after + t * after_row + channel, mask=mask, other=0.0).to(tl.float32)
        y = y.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + t * C + channel, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=STEP_TABLES)
def _tokens(
    x,
    gate,
    after,
    weight,
    bias,
    window,
    out,
    slots,
    fresh,
    chunk_begin,
    chunk_run,
    chunk_first,
    chunk_tokens,
    chunk_tap,
    x_row,
    gate_row,
    after_row,
    slot_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    KP: tl.constexpr,
    BC: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute the outputs of prefills, and the windows of taps. Grid: blocks of channels, chunks.

    ``x``, ``gate``, ``after`` [T, C] by row strides; ``weight`` [C, W + 1]; ``bias`` [C]; ``window`` [slots, C, W] with
    ``slot_stride``; ``out`` [T, C]; ``slots`` int64 [R]; ``fresh`` and the ``chunk_*`` tables int32, of ``gpu.runs``.
    """
    c = tl.program_id(1)
    channel, place = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, PLACES)
    within = channel < C
    run = tl.load(chunk_run + c)
    tokens, first = tl.load(chunk_tokens + c), tl.load(chunk_first + c).to(tl.int64)
    run_first = tl.load(chunk_first + tl.load(chunk_begin + run))
    begin = (first - run_first).to(tl.int32)  # the chunk's first token in its run
    slot = tl.load(slots + run)
    old = window + slot * slot_stride + channel * W
    # How many inputs before the run are valid.
    behind = only_if((slot >= 0) & (tl.load(fresh + run) == 0), W)
    # Input k of a place is token ``begin + place - W + k`` of this run.
    here = place < tokens
    weights = _weights(weight, channel, within, W, KP)
    y = tl.zeros((PLACES, BC), tl.float32)
    if begin < W:
        # Window inputs of the run's first places, the oldest first, as below. The window is read row by row: its tiles
        # have the channels in another order than tiles of x, and would all be transposed.
        for of in tl.static_range(W):
            for k in tl.static_range(W - of):
                entry = begin + of + k
                valid = (of < tokens) & (entry < W) & (entry - W + behind >= 0)
                window_input = tl.load(old + entry, mask=channel < only_if(valid, C), other=0.0).to(tl.float32)
                # Multiplied and added one by one, like other inputs and in decodes, so that the bits are the same.
                y = tl.where((place == of)[:, None], y + window_input[None, :] * _weight(weights, k, KP)[None, :], y)
    for k in tl.static_range(W + 1):
        position = begin + place - W + k
        mask = (here & (position >= 0))[:, None] & within[None, :]
        seen = _input(
            x, gate, (run_first.to(tl.int64) + position)[:, None], channel[None, :], mask, x_row, gate_row, GATED
        )
        y += seen * _weight(weights, k, KP)[None, :]
    t = (first + place)[:, None]
    _output(
        out,
        y,
        after,
        bias,
        t,
        channel[None, :],
        within[None, :],
        here[:, None] & within[None, :],
        after_row,
        C,
        BIAS,
        SILU,
        GATED,
    )
    tap = tl.load(chunk_tap + c).to(tl.int64)
    if tap >= 0:
        for k in tl.static_range(W):
            last = begin + tokens - W + k
            entry = _input(
                x, gate, run_first.to(tl.int64) + last, channel, channel < only_if(last >= 0, C), x_row, gate_row, GATED
            )
            earlier = channel < only_if((last < 0) & (last + behind >= 0), C)
            entry = tl.where(earlier, tl.load(old + last + W, mask=earlier, other=0.0).to(tl.float32), entry)
            tl.store(window + tap * slot_stride + channel * W + k, entry.to(window.dtype.element_ty), mask=within)


@triton.jit
def move_run(
    x,
    gate,
    after,
    weight,
    bias,
    window,
    out,
    slots,
    fresh,
    offsets,
    lengths,
    x_row,
    gate_row,
    after_row,
    slot_stride,
    decode_count,
    run,
    block,
    C: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BC: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    """Move the window of ``run`` on, in one ``block`` of channels; of a decode, store its output first."""
    channel, entry = block * BC + tl.arange(0, BC), tl.arange(0, WP)
    within = channel < C
    slot = tl.load(slots + run)
    behind = only_if((slot >= 0) & (tl.load(fresh + run) == 0), W)
    first, length = tl.load(offsets + run).to(tl.int64), tl.load(lengths + run)
    old = window + slot * slot_stride + channel * W
    if run < decode_count:
        y = tl.zeros((BC,), tl.float32)
        for k in tl.static_range(W + 1):
            if k < W:
                seen = tl.load(old + k, mask=channel < only_if(behind > 0, C), other=0.0).to(tl.float32)
            else:
                seen = _input(x, gate, first, channel, within, x_row, gate_row, GATED)
            y += seen * tl.load(weight + channel * (W + 1) + k, mask=within, other=0.0).to(tl.float32)
        _output(out, y, after, bias, first, channel, within, within, after_row, C, BIAS, SILU, GATED)
    position = (length - W + entry)[None, :]
    mask = within[:, None] & (position >= 0) & (entry < W)[None, :]
    seen = _input(x, gate, first + position, channel[:, None], mask, x_row, gate_row, GATED)
    before = within[:, None] & (position < 0) & (position + behind >= 0) & (entry < W)[None, :]
    seen = tl.where(before, tl.load(old[:, None] + position + W, mask=before, other=0.0).to(tl.float32), seen)
    # A program reads all of its window before it writes any: neighbouring threads may hold neighbouring
    # entries.
    tl.debug_barrier()
    tl.store(
        old[:, None] + entry[None, :],
        seen.to(window.dtype.element_ty),
        mask=within[:, None] & (entry < only_if(slot >= 0, W))[None, :],
    )


@triton.jit(do_not_specialize=["decode_count"], do_not_specialize_on_alignment=STEP_TABLES)
def _rows(
    x,
    gate,
    after,
    weight,
    bias,
    window,
    out,
    slots,
    fresh,
    offsets,
    lengths,
    x_row,
    gate_row,
    after_row,
    slot_stride,
    decode_count,
    C: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    BC: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute decodes and move the windows on. Grid: blocks of channels, runs. Arguments as for ``_tokens``;
    ``offsets``, ``lengths`` int32 [R].
    """
    move_run(
        x,
        gate,
        after,
        weight,
        bias,
        window,
        out,
        slots,
        fresh,
        offsets,
        lengths,
        x_row,
        gate_row,
        after_row,
        slot_stride,
        decode_count,
        tl.program_id(1),
        tl.program_id(0),
        C,
        W,
        WP,
        BC,
        BIAS,
        SILU,
        GATED,
    )


def convolve(
    x_TC: torch.Tensor,
    gate_TC: torch.Tensor | None,
    after_TC: torch.Tensor | None,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    window_SCW: torch.Tensor,
    runs: Runs,
    *,
    silu: bool,
) -> torch.Tensor:
    """Return ``after * act(conv(gate * x))``; no gates if both are None."""
    tokens, channels = x_TC.shape
    x_TC, weight_CK = dense_rows(x_TC), weight_CK.contiguous()
    gate = x_TC if gate_TC is None else dense_rows(gate_TC)
    after = x_TC if after_TC is None else dense_rows(after_TC)
    out_TC = torch.empty((tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    step = device_runs(runs)
    tensors = (
        x_TC,
        gate,
        after,
        weight_CK,
        weight_CK if bias_C is None else bias_C,
        window_SCW,
        out_TC,
        runs.slots_R,
        step.fresh_R,
    )
    strides = (x_TC.stride(0), gate.stride(0), after.stride(0), window_SCW.stride(0))
    form = {
        "C": channels,
        "W": window_SCW.shape[2],
        "BIAS": bias_C is not None,
        "SILU": silu,
        "GATED": gate_TC is not None,
    }
    if step.chunk_count:
        launch(_tokens, (triton.cdiv(channels, TOKENS.width), step.chunk_count))(
            *tensors,
            step.chunk_begin_R,
            step.chunk_run_C,
            step.chunk_first_C,
            step.chunk_tokens_C,
            step.chunk_tap_C,
            *strides,
            **form,
            KP=triton.next_power_of_2(form["W"] + 1),
            BC=TOKENS.width,
            num_warps=TOKENS.warps,
        )
    # After `_tokens`: a run's first tokens read the window that its last tokens replace here.
    launch(_rows, (triton.cdiv(channels, ROWS.width), step.run_count))(
        *tensors,
        step.offsets_R,
        step.lengths_R,
        *strides,
        step.decode_count,
        **form,
        WP=triton.next_power_of_2(window_SCW.shape[2]),
        BC=ROWS.width,
        num_warps=ROWS.warps,
    )
    return out_TC


def causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: Literal["silu"] | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    return convolve(x_TC, None, None, weight_CK, bias_C, window_SCW, runs, silu=activation == "silu")


def short_conv(
    projected_TJ: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    if runs.log is not None:

        def replay(logged_TJ: torch.Tensor, again: Runs) -> torch.Tensor:
            return short_conv(logged_TJ, weight_CK, bias_C, window_SCW, again)

        runs.log.note(replay, projected_TJ)
    b, c, x = projected_TJ.chunk(3, dim=-1)
    with restored(window_SCW, runs):
        return convolve(x, b, c, weight_CK, bias_C, window_SCW, runs, silu=False)
