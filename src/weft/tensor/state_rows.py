"""States of a set of runs: from their slots into a dense buffer, and back.

    slots_R   [ 5 | PAD | 2 ]        read          write
    fresh_R   [ - |  -  | x ]     ---------->  buffer [3, ...]  ---------->  slots 5 and 2
                                  rows 1 and 2 are zeros         row 1 is dropped

PAD rows are never read and never written (L4). Verify runs are read and not written. The decode rows
and the prefill rows of a step are two sets, each computed once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from weft.tensor.inputs import Runs
from weft.tensor.scratch import scratch
from weft.units import PAD

STATE_BLOCK_BYTES = 2 << 20
"""Bytes of a block of decode rows. Reading a state, updating it and writing it back are several passes; a block stays
in the L2 cache between them: 40 % less time than all rows at once for states of 1 MB.
"""


@dataclass(frozen=True, slots=True)
class StateRows:
    span: slice
    """The position of these rows among the rows of the step."""
    read_R: torch.Tensor
    """int64 slot of each row, 0 for rows that are not read."""
    blank: torch.Tensor | None
    """Rows that start from zeros (fresh or PAD); None if there are none."""
    written_rows: torch.Tensor | None
    """Rows with a slot to write; None if all have one."""
    write: torch.Tensor
    """int64 slots of ``written_rows``."""

    def read(self, state: torch.Tensor, name: str) -> torch.Tensor:
        """Return ``[rows, *part]`` in the dtype of ``state``, in a scratch buffer called ``name``."""
        buffer = scratch.take(name, (self.read_R.numel(), *state.shape[1:]), state.dtype)
        if state.shape[0] == 0:
            return buffer.zero_()
        torch.index_select(state, 0, self.read_R, out=buffer)
        # Zeros instead of the content of the slot, which may be anything (L6): the gather needs some index.
        if self.blank is not None:
            buffer.index_fill_(0, self.blank, 0)
        return buffer

    def write_back(self, state: torch.Tensor, buffer: torch.Tensor) -> None:
        if self.written_rows is not None:
            buffer = buffer.index_select(0, self.written_rows)
        if self.write.numel():
            state.index_copy_(0, self.write, buffer.to(state.dtype))


def prefill_rows(runs: Runs, chosen: Sequence[int], memo_key: str) -> StateRows:
    """Return the rows for runs ``chosen``, in that order; cached in ``runs.memo`` under ``memo_key``."""
    return runs.once(memo_key, lambda: _rows(runs, chosen, 0))


def decode_blocks(runs: Runs, state: torch.Tensor) -> list[StateRows]:
    """Return the decode rows, in blocks that suit the size of one slot's part of ``state``."""
    part_bytes = state.itemsize * prod(state.shape[1:])
    # Small states are one block anyway.
    block = max(1, STATE_BLOCK_BYTES // part_bytes)
    return runs.once(
        f"state_rows.decode.{min(block, runs.decode_count)}",
        lambda: [
            _rows(runs, range(begin, min(begin + block, runs.decode_count)), begin)
            for begin in range(0, runs.decode_count, block)
        ],
    )


@contextmanager
def restored(state: torch.Tensor, runs: Runs) -> Iterator[None]:
    """Undo writes inside the context to the slots of verify runs: for kernels that write every slot."""
    if runs.log is None or not runs.verify_count:
        yield
        return
    index = runs.once("verified_slots", lambda: _verified_slots(runs))
    # Before the kernel writes: it treats verify runs as any others.
    before = state.index_select(0, index)
    yield
    state.index_copy_(0, index, before)


def _verified_slots(runs: Runs) -> torch.Tensor:
    slots_V = runs.slots_R[runs.decode_count : runs.decode_count + runs.verify_count]
    # PAD, which a recorded step has, is another window's slot: it gets the same bytes once more.
    return torch.where(slots_V == PAD, slots_V.amax().clamp(min=0), slots_V)


def _rows(runs: Runs, chosen: Sequence[int], begin: int) -> StateRows:
    device = runs.slots_R.device
    slots = [runs.slots[run] for run in chosen]
    blank = [row for row, run in enumerate(chosen) if slots[row] == PAD or runs.fresh[run]]
    written_rows = [row for row, run in enumerate(chosen) if slots[row] != PAD and runs.keeps(run)]

    def indices(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StateRows(
        span=slice(begin, begin + len(slots)),
        read_R=indices([max(slot, 0) for slot in slots]),
        blank=indices(blank) if blank else None,
        written_rows=indices(written_rows) if len(written_rows) < len(slots) else None,
        write=indices([slots[row] for row in written_rows]),
    )
