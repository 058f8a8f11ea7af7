"""mamba2 by Triton: the recurrence for decodes; for prefills the chunked form of ``cpu`` in three launches.

    recurrent   a program: (block of P, head, run)      token by token, the state [P block, N] in registers
    prepare     a program: (group, chunk)               C B^T once for its heads; sizes and decays of steps
    states      a program: (block of P, head, run)      S of each chunk to a buffer, taps, slot
    outputs     a program: (block of P, head, chunk)    y = C S + (C B^T decays sizes) x + D x

A decode reads its slot once and writes it once, in place, rows of N in 16 bytes a thread. Prefills of states
in few bits use the recurrence too in models of float32: those states are rounded after every token
(``tensor.rounding``). In models of 16 bits ``states`` rounds them after each chunk (decision 0081).

Only ``states`` is sequential: one product x B a chunk, whose inputs do not depend on S. So the next chunk's x
and B load while this one is multiplied, and the chain is a multiply-add. A state per chunk is written once
and read once, in segments of bounded scratch (``tensor.gpu.segments``).

PAD slots are neither read nor written, fresh slots not read; inside a slot the state is dense.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import STEP_TABLES, Blocks, dense_rows, launch, padded
from weft.tensor.gpu.pages import capability_of
from weft.tensor.gpu.products import (
    decay_of,
    decay_sums,
    pairwise_decay,
    product,
    product_of_thirds,
    product_right,
    rounded,
    softplus,
)
from weft.tensor.gpu.recurrence import launch_by_token, load_slot, position_shift, store_slot
from weft.tensor.gpu.runs import DeviceRuns, device_runs
from weft.tensor.gpu.segments import load_state, part_of_run, scratch_of, segments, store_state
from weft.tensor.inputs import Runs
from weft.tensor.native import STATE_DIM_MAX
from weft.tensor.op import UNFIT, Unfit
from weft.units import CHUNK_TOKENS

PLACES = tl.constexpr(CHUNK_TOKENS)
RECURRENT = Blocks(32)
PREPARE = Blocks(32)


def states_blocks(n_padded: int) -> Blocks:
    """Return the blocks of ``states``. The state and a product of 32 x 128 take half of each thread's registers."""
    return Blocks(32 if n_padded <= 128 else 16, stages=3)


def outputs_blocks(n_padded: int, head_dim: int, capability: int) -> Blocks:
    """Return the blocks of ``outputs``. On Hopper and the B200 a program has all of a head's P, as 64 lines. There
    ptxas 12.8, of Triton 3.6, makes wrong addresses for 16 or 32 lines; the compile gate sees them. Registers of other
    GPUs hold no more of a state in three bf16 parts than 32 lines of N = 128.
    """
    if 90 <= capability < 120:
        return Blocks(64, warps=4)
    return Blocks(min(32 if n_padded <= 128 else 16, padded(head_dim)))


@triton.jit
def _step_size(dt, bias, low, high):
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), low), high)


@triton.jit
def _token(
    s,
    x,
    dt,
    b,
    c,
    out,
    t,
    head,
    group,
    line,
    col,
    a,
    d,
    bias,
    low,
    high,
    x_row,
    x_head,
    dt_row,
    dt_head,
    b_row,
    b_head,
    c_row,
    c_head,
    out_row,
    P: tl.constexpr,
    N: tl.constexpr,
):
    """Advance ``s`` [P block, N] by one token of one head, and store the token's output."""
    x_t = tl.load(x + t * x_row + head * x_head + line, mask=line < P, other=0.0).to(tl.float32)
    b_t = tl.load(b + t * b_row + group * b_head + col, mask=col < N, other=0.0).to(tl.float32)
    c_t = tl.load(c + t * c_row + group * c_head + col, mask=col < N, other=0.0).to(tl.float32)
    size = _step_size(tl.load(dt + t * dt_row + head * dt_head), bias, low, high)
    s = s * decay_of(size * a) + (x_t * size)[:, None] * b_t[None, :]
    y_t = tl.sum(s * c_t[None, :], axis=1) + d * x_t
    tl.store(out + t * out_row + head * P + line, y_t.to(out.dtype.element_ty), mask=line < P)
    return s


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
    x_head,
    dt_row,
    dt_head,
    b_row,
    b_head,
    c_row,
    c_head,
    out_row,
    slot_stride,
    first_run,
    layer,
    low,
    high,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BP: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """Run the recurrence. Grid: blocks of P, heads, runs from ``first_run`` on. Token t of a decode run is t = run.

    ``x`` [T, H, P], ``dt`` [T, H], ``b`` and ``c`` [T, H / GROUP, N] by strides in elements; ``A``, ``D``, ``dt_bias``
    [H]; ``out`` [T, H, P]; ``state`` [slots, H, P, N] with ``slot_stride``; ``slots``, ``starts`` int64 [R]; ``fresh``
    and the ``chunk_*`` tables int32, of ``gpu.runs``. ``low``, ``high``: limits of a step.
    """
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, NP)
    element = (head * P + line)[:, None] * N + col[None, :]
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    s = load_slot(state, element, slot, slot_stride, tl.load(fresh + run), line, P, col < N)
    a, d = tl.load(A + head).to(tl.float32), tl.load(D + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    position = tl.load(starts + run)
    group = head // GROUP
    if PREFILL:
        begin = tl.load(chunk_begin + run)
        run_first = tl.load(chunk_first + begin).to(tl.int64)
        for chunk in range(begin, tl.load(chunk_begin + run + 1)):
            first = tl.load(chunk_first + chunk)
            for t in range(first, first + tl.load(chunk_tokens + chunk)):
                index = t - run_first
                s = _token(
                    s,
                    x,
                    dt,
                    b,
                    c,
                    out,
                    run_first + index,
                    head,
                    group,
                    line,
                    col,
                    a,
                    d,
                    bias,
                    low,
                    high,
                    x_row,
                    x_head,
                    dt_row,
                    dt_head,
                    b_row,
                    b_head,
                    c_row,
                    c_head,
                    out_row,
                    P,
                    N,
                )
                s = rounded(s, dtype, element, position + index, layer)
            tap = tl.load(chunk_tap + chunk).to(tl.int64)
            store_slot(s, state, element, tap, slot_stride, line, P, col < N)
    else:
        s = _token(
            s,
            x,
            dt,
            b,
            c,
            out,
            run,
            head,
            group,
            line,
            col,
            a,
            d,
            bias,
            low,
            high,
            x_row,
            x_head,
            dt_row,
            dt_head,
            b_row,
            b_head,
            c_row,
            c_head,
            out_row,
            P,
            N,
        )
        s = rounded(s, dtype, element, position, layer)
    store_slot(s, state, element, slot, slot_stride, line, P, col < N)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _prepare(
    dt,
    A,
    b,
    c,
    dt_bias,
    scores,
    sizes,
    whole_sums,
    rest_sums,
    pushes,
    decay,
    chunk_first,
    chunk_tokens,
    dt_row,
    dt_head,
    b_row,
    b_head,
    c_row,
    c_head,
    base,
    low,
    high,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BH: tl.constexpr,
):
    """Prepare chunks. Grid: groups, chunks from ``base`` on. ``scores`` [C, G, 64, 64]: C B^T; zeros beyond a chunk's
    tokens. [C, H, 64]: ``sizes`` of steps, the two parts of the sums of log decays (``decay_sums``), and ``pushes``, a
    size times the decay to the end. ``decay`` [C, H]: of the chunk.
    """
    group, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col, place = tl.arange(0, NP), tl.arange(0, PLACES)
    here = place < tl.load(chunk_tokens + base + index)
    t = (tl.load(chunk_first + base + index) + place).to(tl.int64)
    tile = here[:, None] & (col < N)[None, :]
    bs = tl.load(b + t[:, None] * b_row + group * b_head + col[None, :], mask=tile, other=0.0)
    cs = tl.load(c + t[:, None] * c_row + group * c_head + col[None, :], mask=tile, other=0.0)
    score_row = (index * (H // GROUP) + group) * PLACES + place
    tl.store(scores + score_row[:, None] * PLACES + place[None, :], product(cs, tl.trans(bs)))
    for part in range(0, GROUP, BH):
        in_group = part + tl.arange(0, BH)
        head, of_group = group * GROUP + in_group, in_group < GROUP
        stepped = here[:, None] & of_group[None, :]
        bias = tl.load(dt_bias + head, mask=of_group, other=0.0).to(tl.float32)
        rate = tl.load(A + head, mask=of_group, other=0.0).to(tl.float32)
        steps = tl.load(dt + t[:, None] * dt_row + head[None, :] * dt_head, mask=stepped, other=0.0)
        size = tl.where(stepped, _step_size(steps, bias[None, :], low, high), 0.0)
        whole, rest = decay_sums(size * rate[None, :])
        last = place[:, None] == PLACES - 1
        last_whole = tl.sum(tl.where(last, whole, 0.0), axis=0)
        last_rest = tl.sum(tl.where(last, rest, 0.0), axis=0)
        left = decay_of((last_whole[None, :] - whole) + (last_rest[None, :] - rest))
        row = (index * H + head)[None, :] * PLACES + place[:, None]
        tl.store(sizes + row, size, mask=of_group[None, :])
        tl.store(whole_sums + row, whole, mask=of_group[None, :])
        tl.store(rest_sums + row, rest, mask=of_group[None, :])
        tl.store(pushes + row, size * left, mask=of_group[None, :])
        tl.store(decay + index * H + head, decay_of(last_whole + last_rest), mask=of_group)


@triton.jit(do_not_specialize=["first_run", "layer", "base", "limit"], do_not_specialize_on_alignment=STEP_TABLES)
def _states(
    x,
    b,
    pushes,
    decay,
    chunk_states,
    state,
    carry_in,
    carry_out,
    slots,
    starts,
    fresh,
    chunk_begin,
    chunk_first,
    chunk_tokens,
    chunk_tap,
    x_row,
    x_head,
    b_row,
    b_head,
    slot_stride,
    first_run,
    layer,
    base,
    limit,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BP: tl.constexpr,
):
    """Compute the states of chunks. Grid: blocks of P, heads, prefill runs. ``chunk_states`` [C, H, P, N]: the state
    before each chunk. ``pushes`` and ``decay`` as ``_prepare`` wrote them; others as for ``_recurrent``. A state in
    few bits is rounded after each chunk.
    """
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col, place = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, NP), tl.arange(0, PLACES)
    inside = (line < P)[:, None] & (col < N)[None, :]
    element = line[:, None] * N + col[None, :]
    in_slot = head * (P * N) + element
    slot = tl.load(slots + run)
    begin, end, opens, closes = part_of_run(chunk_begin, run, base, limit)
    s = load_state(
        state, in_slot, slot, slot_stride, tl.load(fresh + run), carry_in, begin, end, opens, line, P, col < N
    )
    shift = position_shift(starts, run, chunk_begin, chunk_first)
    for c in range(begin, end):
        first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
        here = place < tokens
        t = (first + place).to(tl.int64)
        chunk = ((c - base) * H + head).to(tl.int64)
        tl.store(chunk_states + chunk * (P * N) + element, s, mask=inside)
        xs = tl.load(
            x + t[:, None] * x_row + head * x_head + line[None, :], mask=here[:, None] & (line < P)[None, :], other=0.0
        )
        bs = tl.load(
            b + t[:, None] * b_row + (head // GROUP) * b_head + col[None, :],
            mask=here[:, None] & (col < N)[None, :],
            other=0.0,
        )
        pushed = xs.to(tl.float32) * tl.load(pushes + chunk * PLACES + place)[:, None]
        s = s * tl.load(decay + chunk) + product_right(tl.trans(pushed), bs)
        s = rounded(s, state.dtype.element_ty, in_slot, shift + first + tokens - 1, layer)
        tap = tl.load(chunk_tap + c).to(tl.int64)
        store_slot(s, state, in_slot, tap, slot_stride, line, P, col < N)
    store_state(s, state, in_slot, slot, slot_stride, carry_out, begin, end, closes, line, P, col < N)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _outputs(
    x,
    c,
    D,
    scores,
    sizes,
    whole_sums,
    rest_sums,
    chunk_states,
    out,
    chunk_first,
    chunk_tokens,
    x_row,
    x_head,
    c_row,
    c_head,
    base,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NP: tl.constexpr,
    BP: tl.constexpr,
):
    """Compute outputs. Grid: blocks of P, heads, chunks from ``base`` on. ``out`` [T, H, P]; ``scores`` to
    ``rest_sums`` as ``_prepare`` wrote them, ``chunk_states`` as ``_states``; others as for ``_recurrent``.
    """
    head, index = tl.program_id(1), tl.program_id(2).to(tl.int64)
    line, col, place = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, NP), tl.arange(0, PLACES)
    here = place < tl.load(chunk_tokens + base + index)
    t = (tl.load(chunk_first + base + index) + place).to(tl.int64)
    x_tile = here[:, None] & (line < P)[None, :]
    group, chunk = head // GROUP, index * H + head
    row = chunk * PLACES + place
    whole, rest = tl.load(whole_sums + row), tl.load(rest_sums + row)
    s = tl.load(
        chunk_states + chunk * (P * N) + col[:, None] + line[None, :] * N,
        mask=(col < N)[:, None] & (line < P)[None, :],
        other=0.0,
    )
    cs = tl.load(
        c + t[:, None] * c_row + group * c_head + col[None, :], mask=here[:, None] & (col < N)[None, :], other=0.0
    )
    # Products with the state, or with decays, keep float32's precision: states are snapshots.
    y_tile = product_of_thirds(cs, s, False) * decay_of(whole + rest)[:, None]
    xs = tl.load(x + t[:, None] * x_row + head * x_head + line[None, :], mask=x_tile, other=0.0)
    y_tile += tl.load(D + head).to(tl.float32) * xs.to(tl.float32)
    score_row = (index * (H // GROUP) + group) * PLACES + place
    weights = tl.load(scores + score_row[:, None] * PLACES + place[None, :]) * pairwise_decay(whole, rest, place)
    y_tile += product_right(weights * tl.load(sizes + row)[None, :], xs)
    tl.store(out + (t * H + head)[:, None] * P + line[None, :], y_tile.to(out.dtype.element_ty), mask=x_tile)


def mamba2(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGN: torch.Tensor,
    C_TGN: torch.Tensor,
    D_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_SHPN: torch.Tensor,
    runs: Runs,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    layer: int = 0,
) -> torch.Tensor | Unfit:
    if B_TGN.shape[2] > STATE_DIM_MAX:
        return UNFIT
    tokens, heads, head_dim = x_THP.shape
    groups, width = B_TGN.shape[1:]
    out_THP = torch.empty((tokens, heads, head_dim), dtype=x_THP.dtype, device=x_THP.device)
    x_THP, B_TGN, C_TGN = dense_rows(x_THP), dense_rows(B_TGN), dense_rows(C_TGN)
    if not x_THP.dtype == B_TGN.dtype == C_TGN.dtype:
        x_THP, B_TGN, C_TGN = x_THP.float(), B_TGN.float(), C_TGN.float()
    A_H, D_H, dt_bias_H = A_H.contiguous(), D_H.contiguous(), dt_bias_H.contiguous()
    inputs = (x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, out_THP)
    strides = (*x_THP.stride()[:2], *dt_TH.stride(), *B_TGN.stride()[:2], *C_TGN.stride()[:2], heads * head_dim)
    sizes = {"GROUP": heads // groups, "P": head_dim, "N": width, "NP": padded(width)}
    grid = (triton.cdiv(head_dim, RECURRENT.width), heads)
    if not launch_by_token(
        _recurrent,
        grid,
        inputs,
        state_SHPN,
        runs,
        strides,
        layer,
        *dt_limit,
        chunked=True,
        **sizes,
        BP=RECURRENT.width,
        num_warps=RECURRENT.warps,
        num_stages=RECURRENT.stages,
    ):
        _run_chunks(inputs, state_SHPN, runs, device_runs(runs), layer, dt_limit, sizes)
    return out_THP


def _run_chunks(
    inputs: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    runs: Runs,
    step: DeviceRuns,
    layer: int,
    dt_limit: tuple[float, float],
    sizes: dict[str, int],
) -> None:
    """Compute the prefills of a step."""
    x, dt, A, b, c, D, dt_bias, out = inputs
    (heads, head_dim, width), groups = state.shape[1:], b.shape[1]
    by_place = (heads, CHUNK_TOKENS)
    shapes = [(groups, CHUNK_TOKENS, CHUNK_TOKENS), *[by_place] * 4, (heads,), (heads, head_dim, width)]
    each, (scores, step_sizes, whole, rest, pushes, decay, chunk_states) = scratch_of(step, shapes)
    tables = (step.chunk_first_C, step.chunk_tokens_C)
    whole_heads = {"H": heads, "GROUP": sizes["GROUP"], "N": width, "NP": sizes["NP"]}
    sizes = whole_heads | {"P": head_dim}
    before = states_blocks(sizes["NP"])
    after = outputs_blocks(sizes["NP"], head_dim, capability_of(state.device))
    prefills = step.run_count - step.decode_count
    for segment in segments(step, state, each):
        launch(_prepare, (groups, segment.chunk_count))(
            dt,
            A,
            b,
            c,
            dt_bias,
            scores,
            step_sizes,
            whole,
            rest,
            pushes,
            decay,
            *tables,
            *dt.stride(),
            *b.stride()[:2],
            *c.stride()[:2],
            segment.begin,
            *dt_limit,
            **whole_heads,
            BH=min(PREPARE.width, padded(sizes["GROUP"])),
            num_warps=PREPARE.warps,
            num_stages=PREPARE.stages,
        )
        launch(_states, (triton.cdiv(head_dim, before.width), heads, prefills))(
            x,
            b,
            pushes,
            decay,
            chunk_states,
            state,
            segment.carry_in,
            segment.carry_out,
            runs.slots_R,
            runs.starts_R,
            step.fresh_R,
            step.chunk_begin_R,
            *tables,
            step.chunk_tap_C,
            *x.stride()[:2],
            *b.stride()[:2],
            state.stride(0),
            step.decode_count,
            layer,
            segment.begin,
            segment.end,
            **sizes,
            BP=before.width,
            num_warps=before.warps,
            num_stages=before.stages,
        )
        launch(_outputs, (triton.cdiv(head_dim, after.width), heads, segment.chunk_count))(
            x,
            c,
            D,
            scores,
            step_sizes,
            whole,
            rest,
            chunk_states,
            out,
            *tables,
            *x.stride()[:2],
            *c.stride()[:2],
            segment.begin,
            **sizes,
            BP=after.width,
            num_warps=after.warps,
            num_stages=after.stages,
        )
