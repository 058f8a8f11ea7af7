"""Steady decodes: the inputs of a step in which the same rows decode as in the one before.

On a CPU (``SteadyDecodes``):

    reused while rows stay      rows, slots, offsets, lengths, fresh, their tensors; the page table by run
    written in each step        tokens | starts | contexts            three rows of one array, in place
    new in each step            the list of starts, and the objects that refer to all of it

While the rows stay, a step calls no operator of torch here. An operator takes a microsecond in a loop, but twenty
right after a model has emptied the caches, and new tensors would need many. This works only on a CPU, where the host
writes the memory that the model reads.

On a GPU the inputs of a step go over in one copy. Those of a graph are one block (``SteadyBlock``): its tokens,
positions, starts and contexts are written in each step, and the rest is that of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weft.runner.graph_shapes import GraphShape
from weft.runner.staging import Staged, Staging
from weft.runner.step_graphs import StepBlock
from weft.schedule.plan import Int32s, StepPlan
from weft.tensor.adapter_rows import StepAdapters
from weft.tensor.inputs import Runs, StepInputs
from weft.units import PAD, PAGE_TOKENS, ceil_div

Int64s = npt.NDArray[np.int64]


class SteadyDecodes:
    """Inputs of steady decodes on a CPU. ``plan`` has only decodes, all of which sample. ``table``: int32 [rows + 1,
    pages], of the rows; ``chosen``: int64 [rows + 1], the token that each row chose last.
    """

    def __init__(self, plan: StepPlan, table: Int32s, chosen: Int64s) -> None:
        count = plan.run_count
        self._same = _what_stays(plan)
        self._chosen = chosen
        self.rows: Int64s = plan.rows.astype(np.int64)
        """[R], the row of each run."""
        self.runs: Int64s = np.arange(count, dtype=np.int64)
        """[R]: the index of each run."""
        self._offsets = self.runs.tolist()
        self._lengths, self._fresh = plan.lengths.tolist(), plan.fresh.tolist()
        self._slots = plan.slots.tolist()
        self._tokens, self._starts, self.contexts = np.empty((3, count), np.int64)
        self._tokens_T, self._starts_R, self._context_R, self._slots_R = map(
            torch.from_numpy, (self._tokens, self._starts, self.contexts, plan.slots.astype(np.int64))
        )
        self._table = np.concatenate((table[self.rows], table[:1]))
        self._table_RP = torch.from_numpy(self._table[:count])
        self._pages, self._page_table_RP = 0, self._table_RP
        self._run_of_row = np.full(len(table), count)  # the last line of the table is for rows with no run
        self._run_of_row[self.rows] = self.runs
        self.step = -1
        """Step number of the plan these inputs belong to."""
        self._host_starts: Sequence[int] = ()
        self._deltas: Int64s | None = None
        self._turns: Int64s = self._starts
        self._turns_T: torch.Tensor | None = None
        self.adapters: StepAdapters | None = None
        """Adapters of the rows: the rows stay, so these do too."""

    def goes_on(self, plan: StepPlan) -> bool:
        """Return whether ``plan`` is a step of the same decodes."""
        # By identity: the planner hands out the same frozen arrays while the same sequences decode.
        return all(mine is other for mine, other in zip(self._same, _what_stays(plan), strict=True))

    def write(self, writes: Int32s) -> None:
        """Record (row, page index, page) [3, k], which were written into the table of the rows."""
        # This table is a copy of the rows' table, ordered by run. `HostRows` writes both, or drops this object.
        self._table[self._run_of_row[writes[0]], writes[1]] = writes[2]

    def turn_by(self, deltas: Int64s) -> None:
        """Set ``deltas`` [R]: the number that each run adds to its position before the rotation
        (``weft.pictures.Turns``).
        """
        self._deltas, self._turns = deltas, np.empty_like(self._starts)
        self._turns_T = torch.from_numpy(self._turns)

    def advance(self, plan: StepPlan) -> None:
        """Take tokens and positions from ``plan``, and ``contexts`` (int64 [R]), the positions of the tokens to be
        chosen.
        """
        self.step = plan.step
        self._host_starts = plan.starts.tolist()
        self._starts[:] = plan.starts
        np.add(self._starts, 1, out=self.contexts)
        if self._deltas is not None:
            np.add(self._starts, self._deltas, out=self._turns)
        self._tokens[:] = plan.tokens

    def inputs(self) -> StepInputs:
        """Return the inputs, in memory that the next ``advance`` overwrites. Tokens that the plan does not know are
        taken from ``chosen`` now.
        """
        if PAD in self._tokens.tolist():
            np.copyto(self._tokens, self._chosen[self.rows], where=self._tokens == PAD)
        pages = ceil_div(max(self._host_starts) + 1, PAGE_TOKENS)
        if pages != self._pages:
            self._pages, self._page_table_RP = pages, self._table_RP[:, :pages]
        runs = Runs(
            self._offsets,
            list(self._host_starts),
            self._lengths,
            self._slots,
            self._fresh,
            len(self._offsets),
            self._starts_R,
            self._slots_R,
            self._context_R,
            self._page_table_RP,
        )
        return StepInputs(self._tokens_T, self._starts_R, runs, adapters=self.adapters, turns=self._turns_T)


class SteadyBlock:
    """Inputs of steady decodes on a GPU. ``plan`` has only decodes, all of which sample, without adapters. ``fields``:
    int64 [6, stride], of the graph of ``shape`` (``graph_shapes.BLOCK_FIELDS``), as ``plan`` has them.
    """

    def __init__(self, plan: StepPlan, fields: Int64s, shape: GraphShape) -> None:
        count = plan.run_count
        self._same = _what_stays(plan)
        self._shape = shape
        self._fields = fields.copy()
        by_run = self._fields[:, :count]
        self._tokens, self._positions, self._starts = by_run[:3]
        self.contexts: Int64s = by_run[4]
        """[R], the context of each run, which is also the position of the token to be chosen."""
        self.rows: Int64s = by_run[5]
        self.runs: Int64s = np.arange(count, dtype=np.int64)
        self._staged: Staged | None = None
        self.step = -1
        """Step number of the plan that is staged."""

    def goes_on(self, plan: StepPlan) -> bool:
        """Return whether ``plan`` is a step of the same decodes, in the same graph."""
        return plan.mtp_drafts is None and all(
            mine is other for mine, other in zip(self._same, _what_stays(plan), strict=True)
        )

    def stage(self, plan: StepPlan, staging: Staging) -> None:
        self.step = plan.step
        self._tokens[:] = plan.tokens
        self._starts[:] = self._positions[:] = plan.starts
        np.add(self._starts, 1, out=self.contexts)
        self._staged = staging.add(self._fields.ravel())

    def block(self) -> StepBlock:
        """Return the block, once it is sent."""
        assert self._staged is not None, "nothing is staged"
        return StepBlock(self._shape, self._staged.device)

    def rows_R(self) -> torch.Tensor:
        """Return ``rows`` on the device."""
        assert self._staged is not None, "nothing is staged"
        stride = self._fields.shape[1]
        return self._staged.device[5 * stride : 5 * stride + len(self.rows)]


def _what_stays(plan: StepPlan) -> tuple[object, ...]:
    return plan.rows, plan.slots, plan.lengths, plan.fresh, plan.samples
