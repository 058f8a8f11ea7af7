"""Rows in memory that the host can write: a CPU.

    table   int32 [rows + 1, pages]   numpy and torch see the same bytes; entries are written in place
    chosen  int64 [rows + 1]          the token that each row chose last, written in place

Most steps change a few entries, and an indexed write of torch costs more than all of them in numpy. So tables
are written while the step is staged, and the arena takes the ids of its work as the plan has them.

A step of the same decodes as the one before it reuses that step's inputs (``decodes``). They hold a copy of
the table by run, which is updated together with the table here. """

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from weft.runner.arena import DeviceArena
from weft.runner.decodes import SteadyDecodes
from weft.runner.sampler import TokenChoice
from weft.runner.staging import Staging
from weft.schedule.plan import StepPlan
from weft.units import PAD


class HostRows:
    """See ``weft.runner.rows.Rows``."""

    def __init__(self, rows_max: int, pages_max: int, *, staging_bytes: int) -> None:
        self._table = np.full((rows_max + 1, max(pages_max, 1)), PAD, np.int32)
        self._chosen = np.zeros(rows_max + 1, np.int64)
        self.table = torch.from_numpy(self._table)
        self.chosen = torch.from_numpy(self._chosen)
        self.staging = Staging(torch.device("cpu"), staging_bytes)
        self._steady: SteadyDecodes | None = None
        self._plan: StepPlan | None = None

    def stage(self, plan: StepPlan) -> None:
        if plan.rows_cleared or plan.admissions:
            self._steady = None
        for cleared in plan.rows_cleared:
            self._table[cleared] = PAD
        for writes in (plan.table_writes, plan.table_patches):
            if writes.size:
                self._table[writes[0], writes[1]] = writes[2]
                if self._steady is not None:
                    self._steady.write(writes)
        self._plan = plan

    def perform(self, arena: DeviceArena) -> None:
        assert self._plan is not None, "nothing is staged"
        for kind, ids in self._plan.arena_work.ordered():
            arena.perform(kind, ids)

    def store(self, arena: DeviceArena) -> None:
        assert self._plan is not None, "nothing is staged"
        for kind, ids in self._plan.arena_work.after_runs():
            arena.perform(kind, ids)

    def steady(self, plan: StepPlan) -> SteadyDecodes | None:
        if self._steady is not None and self._steady.goes_on(plan):
            return self._steady
        self._steady = None
        if 0 < plan.decode_count == plan.run_count and plan.samples.all():
            assert (plan.lengths == 1).all(), "a decode run has one token"
            self._steady = SteadyDecodes(plan, self._table, self._chosen)
        return self._steady

    def note_chosen(self, rows: npt.NDArray[np.int64], rows_X: torch.Tensor | None,
                    choice: TokenChoice) -> None:
        chosen_X = choice.chosen_X
        self._chosen[rows] = chosen_X if isinstance(chosen_X, np.ndarray) else chosen_X.numpy()

    def table_row(self, row: int) -> torch.Tensor:
        self._steady = None
        return self.table[row]
