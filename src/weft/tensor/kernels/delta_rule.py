"""The delta rule by Triton: the recurrence for decodes, the chunked form for prefills.

    recurrent   a program: (block of V, head, run)     token by token, the state [K, V block] in registers
    prepare     a program: (chunk, head)               T, P, and the factors of q and k
    chunks      a program: (block of V, head, run)     v', o, taps, slot; the state in registers

``recurrent`` is decode: a slot is read once and written once, in place. A read is 128 bytes of a row (32
float32 of V: whole sectors, 16 bytes a thread), 16 KB a program at K = 128. At 32 heads there are 128
programs at batch 1 and two thousand at batch 16, enough to keep the copies busy. It is also the prefill of
states in few bits in models of float32: they are rounded after every token (``tensor.rounding``), and that
rounding has no chunked form. Models of 16 bits take chunks there too, and round after each (decision 0081).

The chunked form passes T (with beta) and P through memory: 64 x 64 numbers of four bytes each, for each chunk and
head. W, U, v' and the states before chunks never leave registers, as W S and U are parts of one product:

    v' = U - W S = T beta (v - exp(G) k S)             o = q~ S + P v'

So 8,192 tokens of 32 heads of 128 x 128 move 0.27 GB of scratch a layer; with W, U, v' and the states in memory it was
1.44 GB. Only ``chunks`` is sequential. Its chain has three products a chunk: k S, T, and k^T v'. The two of o depend
on it, and the next chunk does not wait for them. Rejected: a third kernel for outputs, from stored states. It has more
programs for one long prompt, and needs the states and v' in memory: 0.9 GB, or in bfloat16 outputs that err by a third
of a step.

A number of T or P is float32, or two bfloat16 numbers in an int32 (``in_pairs``). A product with a pair takes five
products of bfloat16, and with float32 three of tf32 after both sides are split. Pairs err by up to 2^-17 of a number,
which outputs in bfloat16 cannot show (decision 0055). Rejected: T and P in bfloat16. Their error is that of the
rounded outputs, and states have it too.

The scratch of 32 heads is 1.1 MB a chunk. Chunks go in segments of bounded scratch
(``tensor.gpu.segments``), two launches each.

Run r has the chunks [chunk_begin[r], chunk_begin[r + 1]) of ``tensor.gpu.runs``; a chunk's tap is the state
after it. A PAD slot is neither read nor written, a fresh slot is not read. Inside a slot the state is dense.

Triton does not specialise on numbers that change from step to step: the first prefill run, the layer,
addresses of the step's small tables. Else every combination would be compiled while serving.

``ops.delta_rule`` explains the letters (P is M(q)). ``prepare`` has two kernels. With a decay for each head,
a program takes one chunk of one value head, all of it in registers and shared memory. It stores T, P and
three factors per token. q and k are not normalised: raw products of 16-bit tensors are exact on tensor cores.
Their norms are factors of rows and columns, as the decays are:

    A_ij = beta_i |k_i|^-1 |k_j|^-1 exp(G_i - G_j) k_i.k_j          T = (1 + A below the diagonal)^-1
    P_ij = scale |q_i|^-1 |k_j|^-1 exp(G_i - G_j) q_i.k_j

With a decay for each line of the state, it stores the scaled q and k, and k by both of its decays. M below
its diagonal comes in six levels of halves, all of them on tensor cores. Level h has the pairs of neighbouring
blocks of h places:

    place  0 1 2 3 4 5 6 7      h = 1   (1, 0) (3, 2) (5, 4) (7, 6)
                                h = 2   (2..3, 0..1) (6..7, 4..5)
                                h = 4   (4..7, 0..3)                    up to h = 32: each pair i > j once

    M(x)_ij = (x_i exp(sum of g over the rows' block up to i)) . (k_j exp(sum of g after j in its block))

Both factors are at most 1, whatever the decays. At each level a row is in the later block of its pair or in the
earlier one. So it has one factor, and one tile of scaled k is the left and the right side of M(k). Sums of the next
level add the sum of the other block of the pair. So a sum only adds decays of the places between, all of one sign: its
relative error is at most 6 x 2^-24, and nothing cancels. Products cover the full tile and a select takes the pairs: 12
products of 64 x 64 x 32 for 32 lines. Rejected: blocks of 16 whose diagonal is summed by distance. That is 16 rounds
for 32 lines on CUDA cores, each with loads of shifted rows.

Sums over the lines take 32 lines at a time, so that tiles fit in registers. All other products keep float32's
precision, because states are snapshots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.launch import SMALL_SHARED, STEP_TABLES, Blocks, dense_rows, launch, padded
from weft.tensor.gpu.pages import capability_of
from weft.tensor.gpu.products import (
    after_previous,
    decay_of,
    decay_sums,
    decay_to_end,
    pairwise_decay,
    product,
    product_of_factor,
    product_of_thirds,
    rounded,
    stored_factor,
    unit_lower_inverse,
    unit_scale,
)
from weft.tensor.gpu.recurrence import launch_by_token, load_slot, position_shift, store_slot, warps_of_lines
from weft.tensor.gpu.runs import DeviceRuns, device_runs
from weft.tensor.gpu.segments import Segment, load_state, part_of_run, scratch_of, segments, store_state
from weft.tensor.inputs import Runs
from weft.tensor.native import KEY_DIM_MAX
from weft.tensor.op import UNFIT, Unfit
from weft.units import CHUNK_TOKENS

PLACES = tl.constexpr(CHUNK_TOKENS)
LEVELS = tl.constexpr(CHUNK_TOKENS.bit_length() - 1)
RECURRENT = Blocks(32, warps=1)
"""Blocks for K up to 128. One warp holds its 32 columns in registers, so its sums wait for no other warp: 7 % sooner
than with four warps on an H200, at 64 and at 256 rows.
"""
PREPARE_HEADS = Blocks(CHUNK_TOKENS)
PREPARE_LINES = Blocks(32, warps=8)
CHUNKS = Blocks(16, stages=2)
"""Columns of the state. With 32 more registers spill, and a single prompt has fewer programs. The next chunk's tiles
load meanwhile: with ``prepare``, 8,192 tokens take 19 % less time on an H200, with the same bits.
"""


@triton.jit
def _token(
    s,
    q,
    k,
    v,
    g,
    beta,
    out,
    t,
    head,
    key,
    line,
    col,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    out_row,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_LINE: tl.constexpr,
):
    """Advance ``s`` [K, V block] by one token of one head, and store the token's output."""
    q_t = tl.load(q + t * q_row + key * q_head + line, mask=line < K, other=0.0).to(tl.float32)
    k_t = tl.load(k + t * k_row + key * k_head + line, mask=line < K, other=0.0).to(tl.float32)
    v_t = tl.load(v + t * v_row + head * v_head + col, mask=col < V, other=0.0).to(tl.float32)
    beta_t = tl.load(beta + t * beta_row + head * beta_head).to(tl.float32)
    q_t = q_t * (tl.rsqrt(tl.sum(q_t * q_t) + 1e-6) * scale)
    k_t = k_t * tl.rsqrt(tl.sum(k_t * k_t) + 1e-6)
    if BY_LINE:
        decay = decay_of(tl.load(g + t * g_row + head * g_head + line, mask=line < K, other=0.0))[:, None]
    else:
        decay = decay_of(tl.load(g + t * g_row + head * g_head))
    s = s * decay
    delta = beta_t * (v_t - tl.sum(s * k_t[:, None], axis=0))
    # Both sums read the state before the token, so neither waits for the other.
    o_t = tl.sum(s * q_t[:, None], axis=0) + tl.sum(q_t * k_t) * delta
    tl.store(out + t * out_row + head * V + col, o_t.to(out.dtype.element_ty), mask=col < V)
    return s + k_t[:, None] * delta[None, :]


@triton.jit(do_not_specialize=["first_run", "layer"], do_not_specialize_on_alignment=STEP_TABLES)
def recurrent(
    q,
    k,
    v,
    g,
    beta,
    out,
    state,
    slots,
    starts,
    fresh,
    chunk_begin,
    chunk_first,
    chunk_tokens,
    chunk_tap,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    out_row,
    slot_stride,
    first_run,
    layer,
    scale,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    BY_LINE: tl.constexpr,
    PREFILL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run the recurrence. Grid: blocks of V, heads, runs from ``first_run`` on. Token t of a decode run is t = run.

    ``q``, ``k`` [T, H / GROUP, K]; ``v`` [T, H, V]; ``g`` [T, H], or [T, H, K] with BY_LINE; ``beta`` [T, H]: all by
    strides in elements. ``out`` [T, H, V]; ``state`` [slots, H, K, V] with ``slot_stride``; ``slots``, ``starts`` int64
    [R]; ``fresh`` and the ``chunk_*`` tables int32, of ``gpu.runs``.
    """
    after_previous(PDL)
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    element = (head * K + line)[:, None] * V + col[None, :]
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    s = load_slot(state, element, slot, slot_stride, tl.load(fresh + run), line, K, col < V)
    position = tl.load(starts + run)
    key = head // GROUP
    if PREFILL:
        begin = tl.load(chunk_begin + run)
        run_first = tl.load(chunk_first + begin).to(tl.int64)
        for c in range(begin, tl.load(chunk_begin + run + 1)):
            first = tl.load(chunk_first + c)
            for t in range(first, first + tl.load(chunk_tokens + c)):
                index = t - run_first
                s = _token(
                    s,
                    q,
                    k,
                    v,
                    g,
                    beta,
                    out,
                    run_first + index,
                    head,
                    key,
                    line,
                    col,
                    q_row,
                    q_head,
                    k_row,
                    k_head,
                    v_row,
                    v_head,
                    g_row,
                    g_head,
                    beta_row,
                    beta_head,
                    out_row,
                    scale,
                    K,
                    V,
                    BY_LINE,
                )
                s = rounded(s, dtype, element, position + index, layer)
            tap = tl.load(chunk_tap + c).to(tl.int64)
            store_slot(s, state, element, tap, slot_stride, line, K, col < V)
    else:
        s = _token(
            s,
            q,
            k,
            v,
            g,
            beta,
            out,
            run,
            head,
            key,
            line,
            col,
            q_row,
            q_head,
            k_row,
            k_head,
            v_row,
            v_head,
            g_row,
            g_head,
            beta_row,
            beta_head,
            out_row,
            scale,
            K,
            V,
            BY_LINE,
        )
        s = rounded(s, dtype, element, position, layer)
    store_slot(s, state, element, slot, slot_stride, line, K, col < V)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _prepare_heads(
    q,
    k,
    g,
    beta,
    t_scratch,
    p,
    q_left,
    k_up,
    k_left,
    decay,
    chunk_first,
    chunk_tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    base,
    scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
):
    """Prepare chunks with one decay for each head. Grid: heads, chunks from ``base`` on. Inputs as for ``recurrent``,
    results as for ``chunks``.
    """
    head, c = tl.program_id(0), base + tl.program_id(1)
    chunk = (tl.program_id(1) * H + head).to(tl.int64)
    line, place = tl.arange(0, KP), tl.arange(0, PLACES)
    first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
    here = place < tokens
    t = (first + place).to(tl.int64)
    row = chunk * PLACES + place
    tile = here[:, None] & (line < K)[None, :]
    key = head // GROUP
    whole, rest = decay_sums(tl.load(g + t * g_row + head * g_head, mask=here, other=0.0))
    beta_t = tl.load(beta + t * beta_row + head * beta_head, mask=here, other=0.0).to(tl.float32)
    decays = pairwise_decay(whole, rest, place)
    grown = decay_of(whole + rest)

    keys = tl.load(k + t[:, None] * k_row + key * k_head + line[None, :], mask=tile, other=0.0)
    k_scale = unit_scale(keys.to(tl.float32))
    scaled = decays * k_scale[None, :]
    a = product(keys, tl.trans(keys)) * scaled * (beta_t * k_scale)[:, None]

    queries = tl.load(q + t[:, None] * q_row + key * q_head + line[None, :], mask=tile, other=0.0)
    q_scale = unit_scale(queries.to(tl.float32)) * scale
    attention = product(queries, tl.trans(keys)) * scaled * q_scale[:, None]
    tl.store(
        p + row[:, None] * PLACES + place[None, :], stored_factor(attention, p.dtype.element_ty), mask=here[:, None]
    )
    tl.store(q_left + row, q_scale * grown, mask=here)
    tl.store(k_up + row, k_scale * grown, mask=here)
    left, over_chunk = decay_to_end(whole, rest, place, PLACES)
    tl.store(k_left + row, left * k_scale, mask=here)
    tl.store(decay + chunk, over_chunk)
    tl.store(
        t_scratch + row[:, None] * PLACES + place[None, :],
        stored_factor(unit_lower_inverse(a, PLACES) * beta_t[None, :], t_scratch.dtype.element_ty),
        mask=here[:, None],
    )


@triton.jit
def _rows(x, t, x_row, x_head, head, line, mask, K: tl.constexpr):
    """Return [places, lines] of one head, float32; zeros where ``mask`` [places] is not set."""
    return tl.load(
        x + t[:, None] * x_row + head * x_head + line[None, :], mask=mask[:, None] & (line < K)[None, :], other=0.0
    ).to(tl.float32)


@triton.jit
def _add_pairs(m_keys, m_queries, keys, queries, g, place):
    """Add the contribution of some lines of the state to M(k) and M(q) below their diagonals. Return both, and the
    sums of ``g`` up to and with each place, and after it.
    """
    rows, cols = place[:, None], place[None, :]
    upto, after = g, tl.zeros(g.shape, tl.float32)
    for level in range(LEVELS):
        block = place >> level
        later = (block & 1) == 1
        factor = decay_of(tl.where(later[:, None], upto, after))
        right = keys * factor
        pairs = later[:, None] & ((rows >> level) - 1 == (cols >> level))
        m_keys += tl.where(pairs, product(right, tl.trans(right)), 0.0)
        m_queries += tl.where(pairs, product(queries * factor, tl.trans(right)), 0.0)
        other_end = ((block ^ 1) << level) + (1 << level) - 1
        other = tl.gather(upto, tl.broadcast_to(other_end[:, None], g.shape), 0)
        upto += tl.where(later[:, None], other, 0.0)
        after += tl.where(later[:, None], 0.0, other)
    return m_keys, m_queries, upto, after


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def _prepare_lines(
    q,
    k,
    g,
    beta,
    t_scratch,
    p,
    q_left,
    k_up,
    k_left,
    decay,
    chunk_first,
    chunk_tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    base,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
):
    """Prepare chunks with one decay for each line of a head. Grid: heads, chunks from ``base`` on. Inputs as for
    ``recurrent``, results as for ``chunks`` with BY_LINE.
    """
    head, c = tl.program_id(0), base + tl.program_id(1)
    chunk = (tl.program_id(1) * H + head).to(tl.int64)
    place = tl.arange(0, PLACES)
    tokens = tl.load(chunk_tokens + c)
    here = place < tokens
    t = (tl.load(chunk_first + c) + place).to(tl.int64)
    row = (chunk * PLACES + place)[:, None]
    k_scale, q_scale = tl.zeros((PLACES,), tl.float32), tl.zeros((PLACES,), tl.float32)
    for part in range(0, K, BK):
        line = part + tl.arange(0, BK)
        keys = _rows(k, t, k_row, k_head, head, line, here, K)
        queries = _rows(q, t, q_row, q_head, head, line, here, K)
        k_scale += tl.sum(keys * keys, axis=1)
        q_scale += tl.sum(queries * queries, axis=1)
    k_scale, q_scale = tl.rsqrt(k_scale + 1e-6), tl.rsqrt(q_scale + 1e-6) * scale

    m_keys, m_queries = tl.zeros((PLACES, PLACES), tl.float32), tl.zeros((PLACES, PLACES), tl.float32)
    for part in range(0, K, BK):
        line = part + tl.arange(0, BK)
        keys = _rows(k, t, k_row, k_head, head, line, here, K)
        queries = _rows(q, t, q_row, q_head, head, line, here, K)
        m_keys, m_queries, upto, after = _add_pairs(
            m_keys, m_queries, keys, queries, _rows(g, t, g_row, g_head, head, line, here, K), place
        )
        m_queries += tl.where(place[:, None] == place[None, :], tl.sum(queries * keys, axis=1)[:, None], 0.0)
        over_chunk = decay_of(tl.sum(tl.where(place[:, None] == PLACES - 1, upto, 0.0), axis=0))
        tile = here[:, None] & (line < K)[None, :]
        tl.store(decay + chunk * K + line, over_chunk, mask=line < K)
        tl.store(q_left + row * K + line[None, :], queries * q_scale[:, None] * decay_of(upto), mask=tile)
        tl.store(k_up + row * K + line[None, :], keys * k_scale[:, None] * decay_of(upto), mask=tile)
        tl.store(k_left + row * K + line[None, :], keys * k_scale[:, None] * decay_of(after), mask=tile)
    attention = m_queries * q_scale[:, None] * k_scale[None, :]
    tl.store(p + row * PLACES + place[None, :], stored_factor(attention, p.dtype.element_ty), mask=here[:, None])

    beta_t = tl.load(beta + t * beta_row + head * beta_head, mask=here, other=0.0).to(tl.float32)
    solved = unit_lower_inverse(m_keys * (beta_t * k_scale)[:, None] * k_scale[None, :], PLACES)
    solved = stored_factor(solved * beta_t[None, :], t_scratch.dtype.element_ty)
    tl.store(t_scratch + row * PLACES + place[None, :], solved, mask=here[:, None])


@triton.jit(do_not_specialize=["first_run", "layer", "base", "limit"], do_not_specialize_on_alignment=STEP_TABLES)
def chunks(
    q,
    k,
    v,
    t_scratch,
    p,
    q_left,
    k_up,
    k_left,
    decay,
    out,
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
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    slot_stride,
    first_run,
    layer,
    base,
    limit,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    BY_LINE: tl.constexpr,
    SIDES: tl.constexpr,
):
    """Compute outputs and states of prepared chunks. Grid: blocks of V, heads, prefill runs. Scratch begins at chunk
    ``base``. ``t_scratch``, ``p``: [C, H, 64, 64], of ``stored_factor``. ``q_left``, ``k_up``, ``k_left``: the factors
    of q S, k S and k^T v' [C, H, 64]; with BY_LINE the scaled q and k themselves [C, H, 64, K]. ``decay`` [C, H] or
    [C, H, K]. ``out`` [T, H, V]. A state in few bits is rounded after each chunk, as after its last token.
    """
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col, place = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, PLACES)
    in_slot = head * (K * V) + line[:, None] * V + col[None, :]
    slot, key = tl.load(slots + run), head // GROUP
    begin, end, opens, closes = part_of_run(chunk_begin, run, base, limit)
    s = load_state(
        state, in_slot, slot, slot_stride, tl.load(fresh + run), carry_in, begin, end, opens, line, K, col < V
    )
    shift = position_shift(starts, run, chunk_begin, chunk_first)
    for c in range(begin, end):
        first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
        here = place < tokens
        chunk = ((c - base) * H + head).to(tl.int64)
        token, row = (first + place).to(tl.int64)[:, None], chunk * PLACES + place
        tile, v_tile = here[:, None] & (line < K)[None, :], here[:, None] & (col < V)[None, :]
        # q S comes first: after the other products it takes more registers than there are.
        if BY_LINE:
            queries = tl.load(q_left + row[:, None] * K + line[None, :], mask=tile, other=0.0)
            o_tile = product(queries, s)
            keys = tl.load(k_up + row[:, None] * K + line[None, :], mask=tile, other=0.0)
            seen = product(keys, s)
        else:
            queries = tl.load(q + token * q_row + key * q_head + line[None, :], mask=tile, other=0.0)
            keys = tl.load(k + token * k_row + key * k_head + line[None, :], mask=tile, other=0.0)
            o_tile = product_of_thirds(queries, s, SIDES) * tl.load(q_left + row, mask=here, other=0.0)[:, None]
            seen = product_of_thirds(keys, s, SIDES) * tl.load(k_up + row, mask=here, other=0.0)[:, None]
        values = tl.load(v + token * v_row + head * v_head + col[None, :], mask=v_tile, other=0.0)
        square = row[:, None] * PLACES + place[None, :]
        solved = tl.load(t_scratch + square, mask=here[:, None], other=0)
        added = product_of_factor(solved, values.to(tl.float32) - seen, SIDES)
        o_tile += product_of_factor(tl.load(p + square, mask=here[:, None], other=0), added, SIDES)
        tl.store(out + (token * H + head) * V + col[None, :], o_tile.to(out.dtype.element_ty), mask=v_tile)
        if BY_LINE:
            keys = tl.load(k_left + row[:, None] * K + line[None, :], mask=tile, other=0.0)
            over_chunk = tl.load(decay + chunk * K + line, mask=line < K, other=0.0)[:, None]
            s = s * over_chunk + product(tl.trans(keys), added)
        else:
            left = tl.load(k_left + row, mask=here, other=0.0)
            s = s * tl.load(decay + chunk) + product_of_thirds(tl.trans(keys), added * left[:, None], SIDES)
        s = rounded(s, state.dtype.element_ty, in_slot, shift + first + tokens - 1, layer)
        tap = tl.load(chunk_tap + c).to(tl.int64)
        store_slot(s, state, in_slot, tap, slot_stride, line, K, col < V)
    store_state(s, state, in_slot, slot, slot_stride, carry_out, begin, end, closes, line, K, col < V)


def delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
    *,
    scale: float,
    layer: int = 0,
) -> torch.Tensor | Unfit:
    dtype, (tokens, heads, v_dim) = q_THK.dtype, v_THV.shape
    k_dim, by_line = k_THK.shape[2], g_TH.ndim == 3
    if k_dim > KEY_DIM_MAX:
        return UNFIT
    q_THK, k_THK, v_THV = dense_rows(q_THK), dense_rows(k_THK), dense_rows(v_THV)
    g_TH = dense_rows(g_TH) if by_line else g_TH
    if q_THK.dtype != k_THK.dtype:
        q_THK, k_THK = q_THK.float(), k_THK.float()
    out_THV = torch.empty((tokens, heads, v_dim), dtype=dtype, device=q_THK.device)
    group = heads // k_THK.shape[1]
    qk_strides = (*q_THK.stride()[:2], *k_THK.stride()[:2])
    gate_strides = (*g_TH.stride()[:2], *beta_TH.stride())
    if launch_by_token(
        recurrent,
        (triton.cdiv(v_dim, RECURRENT.width), heads),
        (q_THK, k_THK, v_THV, g_TH, beta_TH, out_THV),
        state_SHKV,
        runs,
        (*qk_strides, *v_THV.stride()[:2], *gate_strides, heads * v_dim),
        layer,
        scale,
        chunked=True,
        GROUP=group,
        K=k_dim,
        V=v_dim,
        KP=padded(k_dim),
        BV=RECURRENT.width,
        BY_LINE=by_line,
        num_warps=RECURRENT.warps * warps_of_lines(k_dim),
        num_stages=RECURRENT.stages,
    ):
        return out_THV
    step = device_runs(runs)
    kernel, blocks, sizes = _prepare_form(by_line, group, k_dim)
    lines = (k_dim,) if by_line else ()
    square, factors = (heads, CHUNK_TOKENS, CHUNK_TOKENS), (heads, CHUNK_TOKENS, *lines)
    each, buffers = scratch_of(step, [square, square, factors, factors, factors, (heads, *lines)])
    if in_pairs(q_THK.dtype, by_line):
        buffers[:2] = [factor.view(torch.int32) for factor in buffers[:2]]
    for segment in segments(step, state_SHKV, each):
        launch(kernel, (heads, segment.chunk_count))(
            q_THK,
            k_THK,
            g_TH,
            beta_TH,
            *buffers,
            step.chunk_first_C,
            step.chunk_tokens_C,
            *qk_strides,
            *gate_strides,
            segment.begin,
            scale,
            H=heads,
            K=k_dim,
            **sizes,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        _run_chunks(q_THK, k_THK, v_THV, out_THV, state_SHKV, runs, step, segment, buffers, layer, by_line=by_line)
    return out_THV


def _prepare_form(by_line: bool, group: int, k_dim: int) -> tuple[Any, Blocks, dict[str, int]]:
    """Return the kernel that prepares chunks, its blocks, and the constants that only it has."""
    if by_line:
        return _prepare_lines, PREPARE_LINES, {"BK": min(PREPARE_LINES.width, padded(k_dim))}
    return _prepare_heads, PREPARE_HEADS, {"GROUP": group, "KP": padded(k_dim)}


def in_pairs(dtype: torch.dtype, by_line: bool) -> bool:
    """Return whether T and P are pairs of bfloat16 numbers. float32 models keep float32's precision, and with decays
    by line more registers would spill.
    """
    return dtype != torch.float32 and not by_line


def chunk_blocks(dtype: torch.dtype, by_line: bool, capability: int) -> tuple[Blocks, bool]:
    """Return the blocks of ``chunks`` for q and k of ``dtype`` on a GPU of ``capability``, and its SIDES: whether a
    product with few columns takes as long as one with twice as many.
    """
    small = capability in SMALL_SHARED and (by_line or dtype != torch.bfloat16)
    return replace(CHUNKS, stages=1) if small else CHUNKS, 90 <= capability < 120


def _run_chunks(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    out_THV: torch.Tensor,
    state_SHKV: torch.Tensor,
    runs: Runs,
    step: DeviceRuns,
    segment: Segment,
    buffers: list[torch.Tensor],
    layer: int,
    *,
    by_line: bool,
) -> None:
    """Launch the kernel after ``prepare``, for the prefill runs of a segment."""
    heads, k_dim, v_dim = state_SHKV.shape[1:]
    blocks, sides = chunk_blocks(q_THK.dtype, by_line, capability_of(q_THK.device))
    launch(chunks, (triton.cdiv(v_dim, blocks.width), heads, step.run_count - step.decode_count))(
        q_THK,
        k_THK,
        v_THV,
        *buffers,
        out_THV,
        state_SHKV,
        segment.carry_in,
        segment.carry_out,
        runs.slots_R,
        runs.starts_R,
        step.fresh_R,
        step.chunk_begin_R,
        step.chunk_first_C,
        step.chunk_tokens_C,
        step.chunk_tap_C,
        *q_THK.stride()[:2],
        *k_THK.stride()[:2],
        *v_THV.stride()[:2],
        state_SHKV.stride(0),
        step.decode_count,
        layer,
        segment.begin,
        segment.end,
        H=heads,
        GROUP=heads // k_THK.shape[1],
        K=k_dim,
        V=v_dim,
        KP=padded(k_dim),
        BV=blocks.width,
        BY_LINE=by_line,
        SIDES=sides,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
