"""mamba2 by Triton: the recurrence for decodes, the chunked form of ``cpu`` for prefills, one launch each.

    recurrent   a program: (block of P, head, run)    token by token, the state [P block, N] in registers
    chunks      a program: (block of P, head, run)    chunk by chunk: outputs and the next state

A decode reads its slot once and writes it once, in place, rows of N in 16 bytes a thread. Prefills of states
in few bits use the recurrence too: those states are rounded after every token (``tensor.rounding``).

One program takes all chunks of a run in order, outputs included. The chain from chunk to chunk is a single
multiply-add, and all four products of a chunk hang off it, so they overlap. No state per chunk is stored: 537
MB for 8192 tokens of 128 heads of 64 x 128. Models have 48 to 256 programs a run. Rejected: the three passes
of the paper's kernels (states by chunk, their sum, outputs), designed for chunks of 256 and a batch of one. P
= 64 is cut in two. Both halves compute C.B, a ninth of a chunk's work. In return registers hold the rest, the
chain is shorter, and a single prompt occupies twice as many SMs.

Products with the state, or with decays, keep float32's precision (``tensor.gpu.products``): states are
checkpoints. PAD slots are neither read nor written, fresh slots not read; inside a slot the state is dense.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.launch import STEP_TABLES, TYPES, Blocks, compilation_of, dense_rows, padded
from weft.tensor.gpu.launcher import launch
from weft.tensor.gpu.products import (
    decay_of,
    decay_sums,
    decay_to_end,
    only_if,
    pairwise_decay,
    product,
    product_left,
    product_right,
    softplus,
)
from weft.tensor.gpu.rounding import rounded
from weft.tensor.gpu.runs import DeviceRuns, device_runs
from weft.tensor.inputs import Runs
from weft.units import CHUNK_TOKENS

PLACES = tl.constexpr(CHUNK_TOKENS)
RECURRENT = Blocks(32)


CHUNKS = Blocks(32, warps=8)


@triton.jit
def _step_size(dt, bias, low, high):
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), low), high)


@triton.jit
def _token(s, x, dt, b, c, out, t, head, group, line, col, a, d, bias, low, high, x_row, x_head, dt_row,
           dt_head, b_row, b_head, c_row, c_head, out_row, P: tl.constexpr, N: tl.constexpr):
    """One token of one head: advances ``s`` [P block, N] and stores the token's output."""
    x_t = tl.load(x + t * x_row + head * x_head + line, mask=line < P, other=0.0).to(tl.float32)
    b_t = tl.load(b + t * b_row + group * b_head + col, mask=col < N, other=0.0).to(tl.float32)
    c_t = tl.load(c + t * c_row + group * c_head + col, mask=col < N, other=0.0).to(tl.float32)
    size = _step_size(tl.load(dt + t * dt_row + head * dt_head), bias, low, high)
    s = s * decay_of(size * a) + (x_t * size)[:, None] * b_t[None, :]
    y_t = tl.sum(s * c_t[None, :], axis=1) + d * x_t
    tl.store(out + t * out_row + head * P + line, y_t.to(out.dtype.element_ty), mask=line < P)
    return s


@triton.jit(do_not_specialize=["first_run", "layer"], do_not_specialize_on_alignment=STEP_TABLES)
def _recurrent(x, dt, A, b, c, D, dt_bias, out, state, slots, starts, fresh, chunk_begin, chunk_first,
               chunk_tokens, chunk_tap, x_row, x_head, dt_row, dt_head, b_row, b_head, c_row, c_head, out_row,
               slot_stride, first_run, layer, low, high, GROUP: tl.constexpr, P: tl.constexpr,
               N: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr, PREFILL: tl.constexpr):
    """Grid: blocks of P, heads, runs from ``first_run`` on. Token t of a decode run is t = run."""
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, NP)
    element = (head * P + line)[:, None] * N + col[None, :]
    dtype = state.dtype.element_ty
    slot = tl.load(slots + run)
    live = (slot >= 0) & (tl.load(fresh + run) == 0)
    s = tl.load(state + slot * slot_stride + element,
                mask=(line < only_if(live, P))[:, None] & (col < N)[None, :], other=0.0).to(tl.float32)
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
                s = _token(s, x, dt, b, c, out, run_first + index, head, group, line, col, a, d, bias, low,
                           high, x_row, x_head, dt_row, dt_head, b_row, b_head, c_row, c_head, out_row, P, N)
                s = rounded(s, dtype, element, position + index, layer)
            tap = tl.load(chunk_tap + chunk).to(tl.int64)
            tl.store(state + tap * slot_stride + element, s.to(dtype),
                     mask=(line < only_if(tap >= 0, P))[:, None] & (col < N)[None, :])
    else:
        s = _token(s, x, dt, b, c, out, run, head, group, line, col, a, d, bias, low, high, x_row, x_head,
                   dt_row, dt_head, b_row, b_head, c_row, c_head, out_row, P, N)
        s = rounded(s, dtype, element, position, layer)
    tl.store(state + slot * slot_stride + element, s.to(dtype),
             mask=(line < only_if(slot >= 0, P))[:, None] & (col < N)[None, :])


@triton.jit(do_not_specialize=["first_run"], do_not_specialize_on_alignment=STEP_TABLES)
def _chunks(x, dt, A, b, c, D, dt_bias, out, state, slots, fresh, chunk_begin, chunk_first, chunk_tokens,
            chunk_tap, x_row, x_head, dt_row, dt_head, b_row, b_head, c_row, c_head, out_row, slot_stride,
            first_run, low, high, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
            BP: tl.constexpr):
    """Grid: blocks of P, heads, prefill runs."""
    head, run = tl.program_id(1), first_run + tl.program_id(2)
    line, col, place = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, NP), tl.arange(0, PLACES)
    element = (head * P + line)[:, None] * N + col[None, :]
    slot = tl.load(slots + run)
    live = (slot >= 0) & (tl.load(fresh + run) == 0)
    s = tl.load(state + slot * slot_stride + element,
                mask=(line < only_if(live, P))[:, None] & (col < N)[None, :], other=0.0)
    a, d = tl.load(A + head).to(tl.float32), tl.load(D + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    group = head // GROUP
    for chunk in range(tl.load(chunk_begin + run), tl.load(chunk_begin + run + 1)):
        here = place < tl.load(chunk_tokens + chunk)
        t = (tl.load(chunk_first + chunk) + place).to(tl.int64)
        x_tile = here[:, None] & (line < P)[None, :]
        tile = here[:, None] & (col < N)[None, :]
        steps = tl.load(dt + t * dt_row + head * dt_head, mask=here, other=0.0)
        size = tl.where(here, _step_size(steps, bias, low, high), 0.0)
        whole, rest = decay_sums(size * a)
        xs = tl.load(x + t[:, None] * x_row + head * x_head + line[None, :], mask=x_tile, other=0.0)
        bs = tl.load(b + t[:, None] * b_row + group * b_head + col[None, :], mask=tile, other=0.0)
        cs = tl.load(c + t[:, None] * c_row + group * c_head + col[None, :], mask=tile, other=0.0)
        scores = product(cs, tl.trans(bs)) * pairwise_decay(whole, rest, place) * size[None, :]
        wide = xs.to(tl.float32)
        y_tile = (product_left(cs, tl.trans(s)) * decay_of(whole + rest)[:, None] + d * wide
                  + product_right(scores, xs))
        tl.store(out + t[:, None] * out_row + head * P + line[None, :], y_tile.to(out.dtype.element_ty),
                 mask=x_tile)
        left, over_chunk = decay_to_end(whole, rest, place, PLACES)
        pushed = wide * (size * left)[:, None]
        s = s * over_chunk + product_right(tl.trans(pushed), bs)
        tap = tl.load(chunk_tap + chunk).to(tl.int64)
        tl.store(state + tap * slot_stride + element, s,
                 mask=(line < only_if(tap >= 0, P))[:, None] & (col < N)[None, :])
    tl.store(state + slot * slot_stride + element, s,
             mask=(line < only_if(slot >= 0, P))[:, None] & (col < N)[None, :])


def mamba2(x_THP: torch.Tensor, dt_TH: torch.Tensor, A_H: torch.Tensor, B_TGN: torch.Tensor,
           C_TGN: torch.Tensor, D_H: torch.Tensor, dt_bias_H: torch.Tensor, state_SHPN: torch.Tensor,
           runs: Runs, *, dt_limit: tuple[float, float] = (0.0, float("inf")),
           layer: int = 0) -> torch.Tensor:
    tokens, heads, head_dim = x_THP.shape
    groups, width = B_TGN.shape[1:]
    out_THP = torch.empty((tokens, heads, head_dim), dtype=x_THP.dtype, device=x_THP.device)
    x_THP, B_TGN, C_TGN = dense_rows(x_THP), dense_rows(B_TGN), dense_rows(C_TGN)
    if not x_THP.dtype == B_TGN.dtype == C_TGN.dtype:
        x_THP, B_TGN, C_TGN = x_THP.float(), B_TGN.float(), C_TGN.float()
    A_H, D_H, dt_bias_H = A_H.contiguous(), D_H.contiguous(), dt_bias_H.contiguous()
    step = device_runs(runs)
    inputs = (x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, dt_bias_H, out_THP, state_SHPN)
    strides = (*x_THP.stride()[:2], *dt_TH.stride(), *B_TGN.stride()[:2], *C_TGN.stride()[:2],
               heads * head_dim, state_SHPN.stride(0))
    sizes = {"GROUP": heads // groups, "P": head_dim, "N": width, "NP": padded(width)}
    if step.decode_count:
        _run_recurrent(inputs, runs, step, strides, layer, dt_limit, sizes, prefill=False)
    if step.decode_count == step.run_count:
        return out_THP
    if state_SHPN.dtype != torch.float32:
        _run_recurrent(inputs, runs, step, strides, layer, dt_limit, sizes, prefill=True)
        return out_THP
    launch(_chunks, (triton.cdiv(head_dim, CHUNKS.width), heads, step.run_count - step.decode_count))(
        *inputs, runs.slots_R, step.fresh_R, step.chunk_begin_R, step.chunk_first_C, step.chunk_tokens_C,
        step.chunk_tap_C, *strides, step.decode_count, *dt_limit, **sizes, BP=CHUNKS.width,
        num_warps=CHUNKS.warps, num_stages=CHUNKS.stages)
    return out_THP


def _run_recurrent(inputs: tuple[torch.Tensor, ...], runs: Runs, step: DeviceRuns, strides: tuple[int, ...],
                   layer: int, dt_limit: tuple[float, float], sizes: dict[str, int], *,
                   prefill: bool) -> None:
    first = step.decode_count if prefill else 0
    count = step.run_count - first if prefill else step.decode_count
    heads = inputs[0].shape[1]
    launch(_recurrent, (triton.cdiv(sizes["P"], RECURRENT.width), heads, count))(
        *inputs, runs.slots_R, runs.starts_R, step.fresh_R, step.chunk_begin_R, step.chunk_first_C,
        step.chunk_tokens_C, step.chunk_tap_C, *strides, first, layer, *dt_limit, **sizes, BP=RECURRENT.width,
        PREFILL=prefill, num_warps=RECURRENT.warps, num_stages=RECURRENT.stages)


def compilations() -> list[Compilation]:
    """For the inputs of models and the states of ``--state-dtype``."""
    sizes = {"GROUP": 16, "P": 64, "N": 128, "NP": 128}
    gates, limits = dict.fromkeys(("A", "D", "dt_bias"), "*fp32"), ("low", "high")
    variants = []
    for name, dtype in TYPES.items():
        pointers = gates | dict.fromkeys(("x", "dt", "b", "c", "out"), dtype)
        short = str(name).removeprefix("torch.")
        for prefill in (False, True):
            variants.append(compilation_of(
                f"mamba2 recurrent {short} prefill {prefill}", _recurrent, pointers | {"state": dtype},
                sizes | {"BP": RECURRENT.width, "PREFILL": prefill}, RECURRENT, limits))
    for dtype, width in (("*bf16", 128), ("*fp32", 128), ("*bf16", 256)):
        pointers = gates | {"state": "*fp32"} | dict.fromkeys(("x", "dt", "b", "c", "out"), dtype)
        variants.append(compilation_of(f"mamba2 chunks {dtype[1:]} {width}", _chunks, pointers,
                                    sizes | {"N": width, "NP": width, "BP": CHUNKS.width}, CHUNKS, limits))
    return variants
