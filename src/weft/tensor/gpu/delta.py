"""What the delta rules share on a GPU: the recurrence, and the pass over the states of chunks.

    recurrent   a program: (block of V, head, run)     token by token, the state [K, V block] in registers
    prepare     a program: (chunk, head)               per op: W, U, P, and the factors of q and k
    states      a program: (block of V, head, run)     S of each chunk to a buffer, U becomes v', taps, slot
    outputs     a program: (block of V, head, chunk)   o = q~ S + P v'

``recurrent`` is decode: a slot is read once and written once, in place. A read is 128 bytes of a row (32
float32 of V: whole sectors, 16 bytes a thread), 16 KB a program at K = 128. At 32 heads there are 128
programs at batch 1 and two thousand at batch 16, enough to keep the copies busy. It is also the prefill of
states in few bits, which are rounded after every token (``tensor.rounding``); that rounding has no chunked
form.

In the chunked form only ``states`` is sequential, and in it only the chain that needs S: two products a
chunk. ``outputs`` computes the tokens' outputs afterwards, on all SMs, from the stored states. Rejected:
outputs inside the pass. It needs no buffer for states, but its chain is twice as long and has only heads x V
/ 32 programs. The scratch of a chunk is float32: for each place and head K + V numbers and a row of P, for
each head a state. 32 heads of 128 x 128 have 4.7 MB a chunk. Chunks go in segments of bounded scratch
(``tensor.gpu.segments``), three launches each.

Run r has the chunks [chunk_begin[r], chunk_begin[r + 1]) of ``tensor.gpu.runs``; a chunk's tap is the state
after it. A PAD slot is neither read nor written, a fresh slot is not read. Inside a slot the state is dense.

Triton does not specialise on numbers that change from step to step: the first prefill run, the layer,
addresses of the step's small tables. Else every combination would be compiled while serving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.launch import STEP_TABLES, TYPES, Blocks, compilation_of, padded
from weft.tensor.gpu.launcher import launch
from weft.tensor.gpu.products import decay_of, only_if, product, product_left
from weft.tensor.gpu.rounding import rounded
from weft.tensor.gpu.runs import DeviceRuns
from weft.tensor.gpu.segments import Segment, chunks_at_once, load_state, part_of_run, segments, store_state
from weft.tensor.inputs import Runs
from weft.units import CHUNK_TOKENS

PLACES = tl.constexpr(CHUNK_TOKENS)
RECURRENT = Blocks(32)


def states_blocks(k_padded: int) -> Blocks:
    """W (float32) and k of one chunk are K x 384 bytes in shared memory, twice with the next ones in flight:
    84 KB at 128. With 32 columns the products take all but half a kilobyte of each thread's registers."""
    return Blocks(16, stages=2 if k_padded <= 128 else 1)


def outputs_blocks(k_padded: int, by_line: bool, q_dtype: torch.dtype) -> Blocks:
    """One program covers all of V = 128, so q and P are read once; eight warps hold the state. If q is
    float32 (given so, or scaled by the decay of each line), Ampere's registers hold its products for 32
    columns only."""
    if by_line:
        return Blocks(32, warps=8)
    if q_dtype == torch.float32:
        return Blocks(32)
    return Blocks(width=128 if k_padded <= 128 else 64, warps=8)


@triton.jit
def _token(s, q, k, v, g, beta, out, t, head, key, line, col, q_row, q_head, k_row, k_head, v_row, v_head,
           g_row, g_head, beta_row, beta_head, out_row, scale, K: tl.constexpr, V: tl.constexpr,
           BY_LINE: tl.constexpr):
    """One token of one head: advances ``s`` [K, V block] and stores the token's output."""
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
def recurrent(q, k, v, g, beta, out, state, slots, starts, fresh, chunk_begin, chunk_first, chunk_tokens,
              chunk_tap, q_row, q_head, k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head,
              out_row, slot_stride, first_run, layer, scale, GROUP: tl.constexpr, K: tl.constexpr,
              V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, BY_LINE: tl.constexpr,
              PREFILL: tl.constexpr):
    """Grid: blocks of V, heads, runs from ``first_run`` on. Token t of a decode run is t = run."""
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    element = (head * K + line)[:, None] * V + col[None, :]
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    live = (slot >= 0) & (tl.load(fresh + run) == 0)
    s = tl.load(state + slot * slot_stride + element,
                mask=(line < only_if(live, K))[:, None] & (col < V)[None, :], other=0.0).to(tl.float32)
    position = tl.load(starts + run)
    key = head // GROUP
    if PREFILL:
        begin = tl.load(chunk_begin + run)
        run_first = tl.load(chunk_first + begin).to(tl.int64)
        for c in range(begin, tl.load(chunk_begin + run + 1)):
            first = tl.load(chunk_first + c)
            for t in range(first, first + tl.load(chunk_tokens + c)):
                index = t - run_first
                s = _token(s, q, k, v, g, beta, out, run_first + index, head, key, line, col, q_row, q_head,
                           k_row, k_head, v_row, v_head, g_row, g_head, beta_row, beta_head, out_row, scale,
                           K, V, BY_LINE)
                s = rounded(s, dtype, element, position + index, layer)
            tap = tl.load(chunk_tap + c).to(tl.int64)
            tl.store(state + tap * slot_stride + element, s.to(dtype),
                     mask=(line < only_if(tap >= 0, K))[:, None] & (col < V)[None, :])
    else:
        s = _token(s, q, k, v, g, beta, out, run, head, key, line, col, q_row, q_head, k_row, k_head, v_row,
                   v_head, g_row, g_head, beta_row, beta_head, out_row, scale, K, V, BY_LINE)
        s = rounded(s, dtype, element, position, layer)
    tl.store(state + slot * slot_stride + element, s.to(dtype),
             mask=(line < only_if(slot >= 0, K))[:, None] & (col < V)[None, :])


@triton.jit(do_not_specialize=["first_run", "base", "limit"], do_not_specialize_on_alignment=STEP_TABLES)
def states(k, k_left, decay, w, u, chunk_states, state, carry_in, carry_out, slots, fresh, chunk_begin,
           chunk_first, chunk_tokens, chunk_tap, k_row, k_head, slot_stride, first_run, base, limit,
           H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
           BV: tl.constexpr, BY_LINE: tl.constexpr):
    """Grid: blocks of V, heads, prefill runs. Buffers begin at chunk ``base``. ``k_left``: the factors of k
    [C, H, 64], or with BY_LINE the scaled k itself [C, H, 64, K]. ``decay``: [C, H] or [C, H, K]. ``u``
    becomes v'; ``chunk_states`` [C, H, K, V]: the state before each chunk."""
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col, place = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, PLACES)
    inside = (line < K)[:, None] & (col < V)[None, :]
    element = line[:, None] * V + col[None, :]
    in_slot = head * (K * V) + element
    slot = tl.load(slots + run)
    begin, end, opens, closes = part_of_run(chunk_begin, run, base, limit)
    s = load_state(state, in_slot, slot, slot_stride, tl.load(fresh + run), carry_in, begin, end, opens,
                   line, K, col < V)
    for c in range(begin, end):
        first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
        here = place < tokens
        chunk = ((c - base) * H + head).to(tl.int64)
        row = (chunk * PLACES + place)[:, None]
        tile, v_tile = here[:, None] & (line < K)[None, :], here[:, None] & (col < V)[None, :]
        tl.store(chunk_states + chunk * (K * V) + element, s, mask=inside)
        w_tile = tl.load(w + row * K + line[None, :], mask=tile, other=0.0)
        added = tl.load(u + row * V + col[None, :], mask=v_tile, other=0.0) - product(w_tile, s)
        tl.store(u + row * V + col[None, :], added, mask=v_tile)
        if BY_LINE:
            keys = tl.load(k_left + row * K + line[None, :], mask=tile, other=0.0)
            over_chunk = tl.load(decay + chunk * K + line, mask=line < K, other=0.0)[:, None]
            s = s * over_chunk + product(tl.trans(keys), added)
        else:
            keys = tl.load(k + (first + place).to(tl.int64)[:, None] * k_row + (head // GROUP) * k_head
                           + line[None, :], mask=tile, other=0.0)
            left = tl.load(k_left + chunk * PLACES + place, mask=here, other=0.0)
            s = s * tl.load(decay + chunk) + product_left(tl.trans(keys), added * left[:, None])
        tap = tl.load(chunk_tap + c).to(tl.int64)
        tl.store(state + tap * slot_stride + in_slot, s,
                 mask=(line < only_if(tap >= 0, K))[:, None] & (col < V)[None, :])
    store_state(s, state, in_slot, slot, slot_stride, carry_out, begin, end, closes, line, K, col < V)


@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=STEP_TABLES)
def outputs(q, q_left, p, u, chunk_states, out, chunk_first, chunk_tokens, q_row, q_head, base,
            H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
            BV: tl.constexpr, BY_LINE: tl.constexpr):
    """Grid: blocks of V, heads, chunks from ``base`` on. ``q_left``: the factors of q S [C, H, 64], or
    with BY_LINE the scaled q itself [C, H, 64, K]; ``p`` [C, H, 64, 64]; ``out`` [T, H, V]."""
    head, c = tl.program_id(1), base + tl.program_id(2)
    line, col, place = tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, PLACES)
    first, tokens = tl.load(chunk_first + c), tl.load(chunk_tokens + c)
    here = place < tokens
    chunk = (tl.program_id(2) * H + head).to(tl.int64)
    row = (chunk * PLACES + place)[:, None]
    tile, v_tile = here[:, None] & (line < K)[None, :], here[:, None] & (col < V)[None, :]
    s = tl.load(chunk_states + chunk * (K * V) + line[:, None] * V + col[None, :],
                mask=(line < K)[:, None] & (col < V)[None, :], other=0.0)
    if BY_LINE:
        o_tile = product(tl.load(q_left + row * K + line[None, :], mask=tile, other=0.0), s)
    else:
        queries = tl.load(q + (first + place).to(tl.int64)[:, None] * q_row + (head // GROUP) * q_head
                          + line[None, :], mask=tile, other=0.0)
        left = tl.load(q_left + chunk * PLACES + place, mask=here, other=0.0)
        o_tile = product_left(queries, s) * left[:, None]
    p_tile = tl.load(p + row * PLACES + place[None, :], mask=here[:, None], other=0.0)
    o_tile += product(p_tile, tl.load(u + row * V + col[None, :], mask=v_tile, other=0.0))
    at = ((first + place).to(tl.int64) * H + head)[:, None] * V + col[None, :]
    tl.store(out + at, o_tile.to(out.dtype.element_ty), mask=v_tile)


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """The scratch memory of a segment, float32. The kernels above state the shapes."""

    w: torch.Tensor
    u: torch.Tensor
    p: torch.Tensor
    q_left: torch.Tensor
    k_left: torch.Tensor
    decay: torch.Tensor
    chunk_states: torch.Tensor


def chunk_segments(step: DeviceRuns, state_SHKV: torch.Tensor,
                   by_line: bool) -> Iterator[tuple[Segment, ChunkBuffers]]:
    """The segments of a step, with one set of buffers for all of them."""
    heads, k_dim, v_dim = state_SHKV.shape[1:]
    lines = (k_dim,) if by_line else ()
    factors = (heads, CHUNK_TOKENS, *lines)
    shapes = [(heads, CHUNK_TOKENS, k_dim), (heads, CHUNK_TOKENS, v_dim), (heads, CHUNK_TOKENS, CHUNK_TOKENS),
              factors, factors, (heads, *lines), (heads, k_dim, v_dim)]
    each = chunks_at_once(step, 4 * sum(map(math.prod, shapes)))
    buffers = ChunkBuffers(*(torch.empty((each, *shape), dtype=torch.float32, device=state_SHKV.device)
                             for shape in shapes))
    for segment in segments(step, state_SHKV, each):
        yield segment, buffers


def run_by_token(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g: torch.Tensor,
                 beta_TH: torch.Tensor, out_THV: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs,
                 step: DeviceRuns, *, scale: float, layer: int) -> bool:
    """The token-by-token part of a step: decodes, and prefills of states that are rounded after each token.
    Returns whether this was the whole step."""
    inputs = (q_THK, k_THK, v_THV, g, beta_TH, out_THV, state_SHKV, runs, step)
    if step.decode_count:
        _run_recurrent(*inputs, prefill=False, scale=scale, layer=layer)
    if step.decode_count == step.run_count:
        return True
    if state_SHKV.dtype == torch.float32:
        return False
    _run_recurrent(*inputs, prefill=True, scale=scale, layer=layer)
    return True


def _run_recurrent(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, g: torch.Tensor,
                   beta_TH: torch.Tensor, out_THV: torch.Tensor, state_SHKV: torch.Tensor, runs: Runs,
                   step: DeviceRuns, *, prefill: bool, scale: float, layer: int) -> None:
    """All decode runs, or all prefill runs; ``g`` [T, H], or [T, H, K] for a decay of each line."""
    heads, k_dim, v_dim = state_SHKV.shape[1:]
    first = step.decode_count if prefill else 0
    count = step.run_count - first if prefill else step.decode_count
    grid = (triton.cdiv(v_dim, RECURRENT.width), heads, count)
    launch(recurrent, grid)(
        q_THK, k_THK, v_THV, g, beta_TH, out_THV, state_SHKV, runs.slots_R, runs.starts_R, step.fresh_R,
        step.chunk_begin_R, step.chunk_first_C, step.chunk_tokens_C, step.chunk_tap_C, *q_THK.stride()[:2],
        *k_THK.stride()[:2], *v_THV.stride()[:2], *g.stride()[:2], *beta_TH.stride(), heads * v_dim,
        state_SHKV.stride(0), first, layer, scale, GROUP=heads // k_THK.shape[1], K=k_dim, V=v_dim,
        KP=padded(k_dim), BV=RECURRENT.width, BY_LINE=g.ndim == 3, PREFILL=prefill, num_warps=RECURRENT.warps,
        num_stages=RECURRENT.stages)


def run_chunks(q_THK: torch.Tensor, k_THK: torch.Tensor, out_THV: torch.Tensor, state_SHKV: torch.Tensor,
               runs: Runs, step: DeviceRuns, segment: Segment, buffers: ChunkBuffers, *,
               by_line: bool) -> None:
    """The kernels after ``prepare``: states, then outputs of a segment."""
    heads, k_dim, v_dim = state_SHKV.shape[1:]
    sizes = {"H": heads, "GROUP": heads // k_THK.shape[1], "K": k_dim, "V": v_dim, "KP": padded(k_dim),
             "BY_LINE": by_line}
    blocks = states_blocks(padded(k_dim))
    launch(states, (triton.cdiv(v_dim, blocks.width), heads, step.run_count - step.decode_count))(
        k_THK, buffers.k_left, buffers.decay, buffers.w, buffers.u, buffers.chunk_states, state_SHKV,
        segment.carry_in, segment.carry_out, runs.slots_R, step.fresh_R, step.chunk_begin_R,
        step.chunk_first_C, step.chunk_tokens_C, step.chunk_tap_C, *k_THK.stride()[:2], state_SHKV.stride(0),
        step.decode_count, segment.begin, segment.end, **sizes, BV=blocks.width, num_warps=blocks.warps,
        num_stages=blocks.stages)
    blocks = outputs_blocks(padded(k_dim), by_line, q_THK.dtype)
    width = min(blocks.width, padded(v_dim))
    launch(outputs, (triton.cdiv(v_dim, width), heads, segment.chunk_count))(
        q_THK, buffers.q_left, buffers.p, buffers.u, buffers.chunk_states, out_THV, step.chunk_first_C,
        step.chunk_tokens_C, *q_THK.stride()[:2], segment.begin, **sizes, BV=width, num_warps=blocks.warps,
        num_stages=blocks.stages)



def recurrent_compilations(op: str, *, by_line: bool) -> list[Compilation]:
    """Decode for the inputs of models and the states of ``--state-dtype``; prefill for states in few bits."""
    variants = []
    for dtype, state, prefill in (("*bf16", "*fp32", False), ("*bf16", "*bf16", False),
                                  ("*bf16", "*bf16", True), ("*fp16", "*fp16", False),
                                  ("*fp32", "*fp32", False)):
        pointers = dict.fromkeys(("q", "k", "v", "out"), dtype) | dict.fromkeys(("g", "beta"), "*fp32")
        constants = {"GROUP": 2, "K": 128, "V": 128, "KP": 128, "BV": RECURRENT.width, "BY_LINE": by_line,
                     "PREFILL": prefill}
        kind = "prefill" if prefill else "decode"
        variants.append(compilation_of(f"{op} {kind} {dtype[1:]} state {state[1:]}", recurrent,
                                    pointers | {"state": state}, constants, RECURRENT))
    return variants


def chunk_compilations(op: str, *, by_line: bool) -> list[Compilation]:
    scratch = dict.fromkeys(("k_left", "q_left", "decay", "w", "u", "p", "chunk_states", "state",
                             "carry_in", "carry_out"), "*fp32")
    variants = []
    for of, k_dim in ((torch.bfloat16, 128), (torch.float32, 128)):
        dtype = TYPES[of]
        sizes = {"H": 32, "GROUP": 1 if by_line else 2, "K": k_dim, "V": k_dim, "KP": k_dim,
                 "BY_LINE": by_line}
        pointers = scratch | dict.fromkeys(("q", "k", "out"), dtype)
        for name, kernel, blocks in (("states", states, states_blocks(k_dim)),
                                     ("outputs", outputs, outputs_blocks(k_dim, by_line, of))):
            variants.append(compilation_of(f"{op} {name} {dtype[1:]} {k_dim}", kernel, pointers,
                                        sizes | {"BV": blocks.width}, blocks))
    return variants
