"""Rows in memory that the host reaches by copies only: a GPU.

    host      cleared rows | table writes | ids of arena work | runs ...     one buffer (``staging``)
                   '------------------- one copy -------------------'
    device    table int32 [rows + 1, pages]     chosen int64 [rows + 1]

Whatever a step changes is staged with the rest of the step. After the copy, indexed writes on the device
apply it, in the order of the stream. Nothing here waits for the device. """

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.arena_work import WorkKind
from weft.runner.arena import DeviceArena
from weft.runner.decodes import SteadyDecodes
from weft.runner.sampler import TokenChoice, as_tensor
from weft.runner.staging import Staged, Staging
from weft.schedule.plan import StepPlan
from weft.units import PAD


class DeviceRows:
    """See ``weft.runner.rows.Rows``."""

    def __init__(self, rows_max: int, pages_max: int, device: torch.device, *, staging_bytes: int) -> None:
        self.table = torch.full((rows_max + 1, max(pages_max, 1)), PAD, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(rows_max + 1, dtype=torch.int64, device=device)
        self.staging = Staging(device, staging_bytes)
        self._cleared: Staged | None = None
        self._table_writes: list[Staged] = []
        self._work: list[tuple[WorkKind, Staged]] = []
        self._stores: list[tuple[WorkKind, Staged]] = []

    def stage(self, plan: StepPlan) -> None:
        add = self.staging.add
        self._cleared = add(np.array(plan.rows_cleared, np.int64)) if plan.rows_cleared else None
        self._table_writes = [add(writes, np.int64) for writes in (plan.table_writes, plan.table_patches)
                              if writes.size]
        self._work = [(kind, add(ids, np.int64)) for kind, ids in plan.arena_work.ordered()]
        self._stores = [(kind, add(ids, np.int64)) for kind, ids in plan.arena_work.after_runs()]

    def perform(self, arena: DeviceArena) -> None:
        if self._cleared is not None:
            self.table.index_fill_(0, self._cleared.device, PAD)
        for writes in self._table_writes:
            rows, columns, pages = writes.device
            self.table.index_put_((rows, columns), pages.to(torch.int32))
        for kind, ids in self._work:
            arena.perform(kind, ids)

    def store(self, arena: DeviceArena) -> None:
        for kind, ids in self._stores:
            arena.perform(kind, ids)

    def steady(self, plan: StepPlan) -> SteadyDecodes | None:
        return None   # a step goes over in one copy, or is a graph's

    def note_chosen(self, rows: npt.NDArray[np.int64], rows_X: torch.Tensor | None,
                    choice: TokenChoice) -> None:
        if rows_X is not None:
            self.chosen.index_copy_(0, rows_X, as_tensor(choice.chosen_X))

    def table_row(self, row: int) -> torch.Tensor:
        return self.table[row]
