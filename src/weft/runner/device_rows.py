"""Rows in memory that the host reaches by copies only: a GPU.

    host      cleared rows | table writes | ids of arena work | runs ...     one buffer (``staging``)
                   '------------------- one copy -------------------'
    device    table int32 [rows + 1, pages]     chosen int64 [rows + 1]

Whatever a step changes is staged with the rest of the step. After the copy, indexed writes on the device
apply it, in the order of the stream. Nothing here waits for the device.

Loads begin behind the other arena work and end beside later steps (``transfers``). Restores of what they
bring are in the same plan, and are done in the step that hands the load over.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.arena_work import WorkKind
from weft.runner.arena import DeviceArena
from weft.runner.decodes import SteadyDecodes
from weft.runner.sampler import TokenChoice, as_tensor
from weft.runner.staging import Staged, Staging
from weft.runner.transfers import Work
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
        self._loads: list[tuple[WorkKind, Staged]] = []
        self._unpacks: list[tuple[WorkKind, Staged]] = []
        self._stores: list[tuple[WorkKind, Staged]] = []
        self._plan: StepPlan | None = None

    def stage(self, plan: StepPlan) -> None:
        add = self.staging.add
        self._cleared = add(np.array(plan.rows_cleared, np.int64)) if plan.rows_cleared else None
        self._table_writes = [add(writes, np.int64) for writes in (plan.table_writes, plan.table_patches)
                              if writes.size]
        self._plan, self._work, self._loads, self._unpacks = plan, [], [], []
        loaded = [page for one in plan.arena_work.page_loads for page in one.pages]
        for kind, ids in plan.arena_work.ordered():
            if kind in (WorkKind.LOAD_PAGES, WorkKind.LOAD_STATES):
                self._loads.append((kind, add(ids, np.int64)))
                continue
            if loaded and kind in (WorkKind.RESTORE_STATES, WorkKind.RESTORE_KV):
                unpacks = np.isin(ids[:, 1], loaded)
                if unpacks.any():
                    self._unpacks.append((kind, add(ids[unpacks], np.int64)))
                ids = ids[~unpacks]
            if ids.size:
                self._work.append((kind, add(ids, np.int64)))
        self._stores = [(kind, add(ids, np.int64)) for kind, ids in plan.arena_work.after_runs()]

    def perform(self, arena: DeviceArena) -> None:
        if self._cleared is not None:
            self.table.index_fill_(0, self._cleared.device, PAD)
        for writes in self._table_writes:
            rows, columns, pages = writes.device
            self.table.index_put_((rows, columns), pages.to(torch.int32))
        assert self._plan is not None, "nothing is staged"
        work, closed = self._plan.arena_work, self._plan.store.closed
        unpacks: Work = ()
        if closed or work.page_copies or work.slot_copies:
            unpacks = arena.settle_loads(closed, [one.src for one in work.page_copies],
                                         [one.src for one in work.slot_copies])
        for kind, ids in (*unpacks, *self._work):
            arena.perform(kind, ids)
        if self._loads:
            arena.device_transfers.load(self._plan.step, self._plan.store.loads, self._loads, self._unpacks)

    def store(self, arena: DeviceArena) -> None:
        if self._stores:
            assert self._plan is not None, "nothing is staged"
            arena.device_transfers.store(self._plan.step, self._stores)

    def steady(self, plan: StepPlan) -> SteadyDecodes | None:
        return None   # a step goes over in one copy, or is a graph's

    def note_chosen(self, rows: npt.NDArray[np.int64], rows_X: torch.Tensor | None,
                    choice: TokenChoice) -> None:
        if rows_X is not None:
            self.chosen.index_copy_(0, rows_X, as_tensor(choice.chosen_X))

    def table_row(self, row: int) -> torch.Tensor:
        return self.table[row]
