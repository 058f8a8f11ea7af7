"""The chunks of a step in segments, so that the scratch memory of chunked recurrences has a bound.

    chunks    | 0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13 |      a segment: the chunks that fit SCRATCH_BYTES
    runs      |  A  |   B   :       B     |    C    |
    carry                   ^ of B        ^ none    ^ none           [2, heads, rows, columns], as states

The chunked forms pass float32 numbers from launch to launch: T and P of the delta rules, a state for each
chunk of Mamba-2, factors. A step of 32,768 tokens of 48 heads has 0.8 GB of T and P in a layer. A segment has
256 MiB at most, which the next segment and the next layer overwrite. Each chunk is computed alike in any
segment, so cuts change no bit.

At most one run spans the end of a segment. ``part_of_run`` gives a program its chunks of a segment; a run without
chunks there neither reads nor writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from weft.tensor.gpu.products import only_if
from weft.tensor.gpu.runs import DeviceRuns
from weft.units import ceil_div

SCRATCH_BYTES = 256 << 20
"""Most bytes of scratch memory of a segment with more than one chunk."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Chunks [begin, end) of the step; ``carry_in``, ``carry_out``: a state [heads, rows, columns]."""

    begin: int
    end: int
    carry_in: torch.Tensor
    carry_out: torch.Tensor

    @property
    def chunk_count(self) -> int:
        return self.end - self.begin


def chunks_at_once(step: DeviceRuns, chunk_bytes: int) -> int:
    """Return the chunks of the longest segment; ``chunk_bytes``: scratch memory of a chunk, all heads."""
    return min(step.chunk_count, max(1, SCRATCH_BYTES // chunk_bytes))


def scratch_of(step: DeviceRuns, shapes: Sequence[tuple[int, ...]]) -> tuple[int, list[torch.Tensor]]:
    """Return ``chunks_at_once`` for float32 buffers of ``shapes``, each the shape of one chunk; and the buffers."""
    each = chunks_at_once(step, 4 * sum(map(math.prod, shapes)))
    return each, [torch.empty((each, *shape), dtype=torch.float32, device=step.offsets_R.device) for shape in shapes]


def segments(step: DeviceRuns, state: torch.Tensor, each: int) -> Iterator[Segment]:
    """Yield segments of ``each`` chunks. ``state`` [slots, heads, rows, columns]; carries have its dtype."""
    if each >= step.chunk_count:
        yield Segment(0, step.chunk_count, state, state)  # no run goes on, so no carry is touched
        return
    # The carry does not go through the slot, because a run with slot PAD has a state too. Two buffers alternate: the
    # program that ends one run and the program that begins the next may run in one launch, in any order.
    carry = torch.empty((2, *state.shape[1:]), dtype=state.dtype, device=state.device)
    for index in range(ceil_div(step.chunk_count, each)):
        yield Segment(index * each, min((index + 1) * each, step.chunk_count), carry[index % 2], carry[(index + 1) % 2])


@triton.jit
def part_of_run(chunk_begin, run, base, limit):
    """Return (first, end, opens, closes): the chunks [first, end) of ``run`` in the segment [base, limit), and whether
    the first and the last chunk of the run are among them. For a run without chunks in the segment first >= end, and
    ``opens`` and ``closes`` are false.
    """
    begin, end = tl.load(chunk_begin + run), tl.load(chunk_begin + run + 1)
    first, last = tl.maximum(begin, base), tl.minimum(end, limit)
    return first, last, (first < last) & (begin >= base), (first < last) & (end <= limit)


@triton.jit
def load_state(state, in_slot, slot, slot_stride, fresh, carry_in, first, end, opens, lines, LINES, columns):
    """Return the state before chunk ``first``, float32: of the slot, zeros, or ``carry_in``. Zeros where ``lines``
    reach LINES or ``columns`` is not set.
    """
    live = opens & (slot >= 0) & (fresh == 0)
    carried = (first < end) & (opens == 0)
    of_slot = tl.load(
        state + slot * slot_stride + in_slot, mask=(lines < only_if(live, LINES))[:, None] & columns[None, :], other=0.0
    )
    of_carry = tl.load(
        carry_in + in_slot, mask=(lines < only_if(carried, LINES))[:, None] & columns[None, :], other=0.0
    )
    return tl.where(carried, of_carry, of_slot).to(tl.float32)


@triton.jit
def store_state(s, state, in_slot, slot, slot_stride, carry_out, first, end, closes, lines, LINES, columns):
    """Store the state after chunk ``end - 1``: to the slot, or to ``carry_out`` if the run goes on."""
    s = s.to(state.dtype.element_ty)
    goes_on = (first < end) & (closes == 0)
    tl.store(
        state + slot * slot_stride + in_slot,
        s,
        mask=(lines < only_if(closes & (slot >= 0), LINES))[:, None] & columns[None, :],
    )
    tl.store(carry_out + in_slot, s, mask=(lines < only_if(goes_on, LINES))[:, None] & columns[None, :])
