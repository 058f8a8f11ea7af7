"""Mamba-1: a linear state per channel, each of whose entries decays at its own rate.

No form of this scan is a product of matrices (Mamba-2 gave up that freedom to get one). Torch computes decodes by the
recurrence, and prefills by the recurrence of all chunks in parallel: 64 steps over [chunks, C, N], whatever the length
of the prompt. Only the state at the beginning of each chunk must be known:

    1. ends     L = the state a chunk leaves if it begins at zero          place by place, all chunks at once
    2. begins   S_0 = the run's state;  S_(c+1) = exp(A sum d) S_c + L_c   chunk after chunk, one product each
    3. outputs  the recurrence again, each chunk from its own S_c          place by place, all chunks at once

The state after a complete chunk is always that of line 2, independent of the cuts of a run: a prompt in several runs
goes through the same numbers as in one. Taps inside a chunk and a run's last, partial chunk are those of line 3.

Source: Gu and Dao, "Mamba" (2023), section 3.3. The C++ kernel (csrc/mamba1.hpp) is the recurrence, token by token,
with the state in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.chunks import LOG_DECAY_MIN, ChunkLayout, ChunkTap, Step, chunk_layout, in_blocks
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, recurrent_op
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import STATE_BLOCK_BYTES, decode_blocks
from weft.units import CHUNK_TOKENS


@recurrent_op("weft.tensor.kernels.mamba1")
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
    """Compute per channel, with ``d_t = softplus(dt_t + dt_bias)``:

        S <- exp(d_t A) S + (d_t x_t) B_t;   y_t = S . C_t + D x_t

    ``x_TC`` [T, C]; ``dt_TC`` [T, C], as projected (bias and softplus are inside); ``A_CN`` [C, N], negative
    (-exp(A_log)); ``B_TN``, ``C_TN`` [T, N], the same for all channels; ``D_C``, ``dt_bias_C`` [C]. Any float
    dtypes; computed in float32. Returns [T, C] in the dtype of ``x_TC``; the gate is the caller's.

     Source: Gu and Dao, "Mamba" (2023), section 3; transformers' mamba.
    """
    wide = x_TC.float()
    step_TC = F.softplus(dt_TC.float() + dt_bias_C.float())
    pushed_TC, a_CN = wide * step_TC, A_CN.float()
    y_TC = wide * D_C.float()
    n = runs.decode_count
    if n:
        y_TC[:n] += _decode(pushed_TC[:n], step_TC[:n], a_CN, B_TN[:n].float(), C_TN[:n].float(), state_SCN, runs)
    if n < runs.run_count:
        y_TC[n:] += _prefill(pushed_TC[n:], step_TC[n:], a_CN, B_TN[n:], C_TN[n:], state_SCN, runs)
    return y_TC.to(x_TC.dtype)


@mamba1.in_cpp
def _mamba1(
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
) -> torch.Tensor | Unfit:
    if not (
        native.fits(x_TC, dt_TC, B_TN, C_TN)
        and state_SCN.dtype in native.STATE_DTYPES
        and x_TC.shape[1] % native.LANES == 0
        and B_TN.shape[1] <= native.STATE_DIM_MAX
    ):
        return UNFIT
    tokens, channels = x_TC.shape
    a, d, bias = (values.float().contiguous() for values in (A_CN, D_C, dt_bias_C))
    out_TC = torch.empty((tokens, channels), dtype=x_TC.dtype)
    native.extension().mamba1(
        native.runs_of(runs),
        native.rows_of(x_TC[:, None]),
        native.rows_of(dt_TC[:, None]),
        native.rows_of(B_TN[:, None]),
        native.rows_of(C_TN[:, None]),
        a.data_ptr(),
        d.data_ptr(),
        bias.data_ptr(),
        out_TC.data_ptr(),
        state_SCN.data_ptr(),
        native.slot_stride(state_SCN),
        channels,
        A_CN.shape[1],
        native.STATE_DTYPES[state_SCN.dtype],
        layer,
    )
    return out_TC


def _advance(
    state: torch.Tensor,
    decay: torch.Tensor,
    step: torch.Tensor,
    a_CN: torch.Tensor,
    pushed: torch.Tensor,
    b: torch.Tensor,
) -> None:
    """Advance X sequences by one token, in place: state, decay (scratch) [X, C, N]; step, pushed [X, C]; b [X, N]."""
    torch.mul(step[:, :, None], a_CN, out=decay)
    state.mul_(decay.clamp_min_(LOG_DECAY_MIN).exp_()).addcmul_(pushed[:, :, None], b[:, None, :])


def _decode(
    pushed_RC: torch.Tensor,
    step_RC: torch.Tensor,
    a_CN: torch.Tensor,
    b_RN: torch.Tensor,
    c_RN: torch.Tensor,
    state_SCN: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    y_R1C = torch.empty(pushed_RC.shape[0], 1, pushed_RC.shape[1], device=pushed_RC.device)
    for rows in decode_blocks(runs, state_SCN):
        span = rows.span
        state = rows.read(state_SCN, "mamba1.state")
        decay = scratch.take("mamba1.decay", state.shape, torch.float32)
        _advance(state, decay, step_RC[span], a_CN, pushed_RC[span], b_RN[span])
        # A row times a transposed matrix: the reverse order of the same product is several times slower.
        torch.bmm(c_RN[span, None, :], state.transpose(1, 2), out=y_R1C[span])
        rows.write_back(state_SCN, state)
    return y_R1C[:, 0]


def _prefill(
    pushed_TC: torch.Tensor,
    step_TC: torch.Tensor,
    a_CN: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    state_SCN: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    whole_R, done = _whole_chunks(chunk_layout(runs), runs), 0

    def block(
        x: dict[str, torch.Tensor], first: int, steps: list[Step], state: torch.Tensor, out: torch.Tensor
    ) -> None:
        nonlocal done
        plan = _plan(first, done, steps, whole_R)
        done += len(steps)
        _block(x, a_CN, plan, state, state_SCN, out[first : first + len(x["step"])])

    inputs = {"pushed": pushed_TC, "step": step_TC, "b": b_TN, "c": c_TN}
    return in_blocks("mamba1", inputs, state_SCN, runs, pushed_TC.shape[1:], block)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Work on the chunks of a block, numbered from the block's first. ``links``, for each step: the chunks [begin,
    end) of rows 0, 1, ...; the rows whose run continues from a complete chunk (None: all); the taps after such a
    chunk. ``inner``: by place, the taps inside a chunk: (chunk, slot). ``last``: (chunk, row) of chunks that are the
    last of a run and incomplete.
    """

    links: tuple[tuple[int, int, list[int] | None, tuple[ChunkTap, ...]], ...]
    whole: tuple[int, ...]
    inner: dict[int, list[tuple[int, int]]]
    last: tuple[tuple[int, int], ...]


def _whole_chunks(layout: ChunkLayout, runs: Runs) -> list[int]:
    """Return, for each row of ``layout.order``, the number of its chunks that end on the grid."""
    if layout.size < CHUNK_TOKENS:
        return [0] * len(layout.order)
    if len(layout.steps) == 1:  # the layout begins at the run's own start
        return [runs.lengths[run] // CHUNK_TOKENS for run in layout.order]
    return [(max(runs.starts[run], 0) % CHUNK_TOKENS + runs.lengths[run]) // CHUNK_TOKENS for run in layout.order]


def _plan(first: int, done: int, steps: list[Step], whole_R: list[int]) -> _Plan:
    """Return the plan for steps ``done``, ``done`` + 1, ... of the layout, whose first chunk is ``first``."""
    links, whole, last = [], [], []
    inner: dict[int, list[tuple[int, int]]] = {}
    for c, step in enumerate(steps, start=done):
        begin = step.first - first
        going = [row for row in range(step.rows) if whole_R[row] > c]
        behind = []
        for tap in step.taps:
            if tap.places == CHUNK_TOKENS and whole_R[tap.row] > c:
                behind.append(tap)
            else:
                inner.setdefault(tap.places, []).append((begin + tap.row, tap.slot))
        links.append((begin, begin + step.rows, None if len(going) == step.rows else going, tuple(behind)))
        whole += [begin + row for row in going]
        last += [(begin + row, row) for row in range(step.rows) if whole_R[row] <= c]
    return _Plan(tuple(links), tuple(whole), inner, tuple(last))


def _block(
    x: dict[str, torch.Tensor],
    a_CN: torch.Tensor,
    plan: _Plan,
    state: torch.Tensor,
    state_SCN: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute some consecutive steps of the scan. ``state``: [rows, C, N], advanced in place; ``out``: [chunks, size,
    C], written.
    """
    count, size, _ = x["step"].shape
    begins = scratch.take("mamba1.begins", (count, *a_CN.shape), torch.float32)
    # In float64, and summed over the full chunk at once: line 2 gives one state, independent of the cuts of runs.
    _link(plan, begins, _ends(x, a_CN, plan.whole), x["step"].double().sum(1).float(), a_CN, state, state_SCN)
    for group in _groups(range(count), a_CN):
        span = slice(group[0], group[-1] + 1)
        running = begins[span]
        # An empty place has d = 0: it decays by 1 and adds nothing.
        decay = scratch.take("mamba1.decay", running.shape, torch.float32)
        for place in range(size):
            _advance(running, decay, x["step"][span, place], a_CN, x["pushed"][span, place], x["b"][span, place])
            out[span, place] = torch.bmm(x["c"][span, place, None, :], running.transpose(1, 2))[:, 0]
            for chunk, slot in plan.inner.get(place + 1, ()):
                if span.start <= chunk < span.stop:
                    state_SCN[slot] = begins[chunk]
    for chunk, row in plan.last:
        state[row] = begins[chunk]


def _ends(x: dict[str, torch.Tensor], a_CN: torch.Tensor, whole: Sequence[int]) -> torch.Tensor:
    """Return [len(whole), C, N]: the state after each chunk of ``whole`` if the chunk begins at zero."""
    ends = scratch.take("mamba1.ends", (len(whole), *a_CN.shape), torch.float32).zero_()
    for group in _groups(range(len(whole)), a_CN):
        running = ends[group[0] : group[-1] + 1]
        decay = scratch.take("mamba1.decay", running.shape, torch.float32)
        chosen = torch.tensor([whole[i] for i in group], device=a_CN.device)
        step, pushed, b = (x[name].index_select(0, chosen) for name in ("step", "pushed", "b"))
        for place in range(step.shape[1]):
            _advance(running, decay, step[:, place], a_CN, pushed[:, place], b[:, place])
    return ends


def _link(
    plan: _Plan,
    begins: torch.Tensor,
    ends: torch.Tensor,
    sums_XC: torch.Tensor,
    a_CN: torch.Tensor,
    state: torch.Tensor,
    state_SCN: torch.Tensor,
) -> None:
    """Write the state at the beginning of each chunk, chunk after chunk, from the run's state and the ends of the
    chunks before.
    """
    ends_used = 0
    for begin, end, going, taps in plan.links:
        begins[begin:end] = state[: end - begin]
        if going is None:
            alive, sums = state[: end - begin], sums_XC[begin:end]
        else:
            chosen = torch.tensor(going, dtype=torch.int64, device=a_CN.device)
            alive, sums = state.index_select(0, chosen), sums_XC.index_select(0, chosen + begin)
        decay = (sums[:, :, None] * a_CN).clamp_min_(LOG_DECAY_MIN).exp_()
        alive.mul_(decay).add_(ends[ends_used : ends_used + len(alive)])
        ends_used += len(alive)
        if going is not None:
            state.index_copy_(0, chosen, alive)
        for tap in taps:
            state_SCN[tap.slot] = state[tap.row]


def _groups(chunks: range, a_CN: torch.Tensor) -> Iterator[range]:
    # A group's states stay in the L2 cache for all of their places.
    size = max(1, STATE_BLOCK_BYTES // (4 * a_CN.numel()))
    for begin in range(0, len(chunks), size):
        yield chunks[begin : begin + size]
