"""Rows of the executor: the page table, the token that each row chose last, and the step's staging buffer.

    stage(plan)      clear rows, write and patch the table, take the arena work          before ``send``
    perform(arena)   the rest of it, and the arena work in its one order                  after ``send``
    store(arena)     the arena work that comes after the runs
    steady(plan)     inputs that go on from the step before, if there are any

    HostRows      a CPU: numpy and torch see the same bytes; entries are written in place
    DeviceRows    a GPU: all changes of a step are staged with the rest of the step, in one copy; indexed
                  writes on the device apply it, in the order of the stream. Loads overlap later steps,
                  and their restores come with the step that hands the load over

The executor chooses one of them once (``rows_on``), and the batch builder uses either.

Laws: L4 (one extra row stays PAD: it is the row of every PAD run); L5 (a cleared row is PAD before its next sequence
writes it); L6 and L7 (the order of ``ArenaWork``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.arena_work import WorkKind
from weft.runner.arena import DeviceArena
from weft.runner.decodes import SteadyDecodes
from weft.runner.sampler import TokenChoice, as_tensor
from weft.runner.staging import Staged, Staging, step_bytes
from weft.runner.transfers import Work
from weft.schedule.plan import StepPlan
from weft.tensor.device import is_remote
from weft.units import PAD


class DeviceRows:
    """Rows on a GPU. ``table``: int32 [rows_max + 1, pages_max]; the last row is that of every PAD run. ``chosen``:
    int64 [rows_max + 1], the token that each row chose last.
    """

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
        """Stage the changes that ``plan`` makes to rows and arena, once ``staging`` has begun."""
        add = self.staging.add
        self._cleared = add(np.array(plan.rows_cleared, np.int64)) if plan.rows_cleared else None
        self._table_writes = [
            add(writes, np.int64) for writes in (plan.table_writes, plan.table_patches) if writes.size
        ]
        self._plan, self._work, self._loads, self._unpacks = plan, [], [], []
        loaded = [page for load in plan.arena_work.page_loads for page in load.pages]
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
        """Apply the staged changes, once ``staging`` is sent."""
        if self._cleared is not None:
            self.table.index_fill_(0, self._cleared.device, PAD)
        for writes in self._table_writes:
            rows, columns, pages = writes.device
            self.table.index_put_((rows, columns), pages.to(torch.int32))
        assert self._plan is not None, "nothing is staged"
        work, closed = self._plan.arena_work, self._plan.store.closed
        unpacks: Work = ()
        if closed or work.page_copies or work.slot_copies:
            unpacks = arena.settle_loads(
                closed, [copy.src for copy in work.page_copies], [copy.src for copy in work.slot_copies]
            )
        for kind, ids in (*unpacks, *self._work):
            arena.perform(kind, ids)
        if self._loads:
            arena.device_transfers.load(self._plan.step, self._plan.store.loads, self._loads, self._unpacks)

    def store(self, arena: DeviceArena) -> None:
        if self._stores:
            assert self._plan is not None, "nothing is staged"
            arena.device_transfers.store(self._plan.step, self._stores)

    def steady(self, plan: StepPlan) -> SteadyDecodes | None:
        """Return the inputs of ``plan`` if it has only decodes that can go on from step to step."""
        return None  # a step goes over in one copy, or is a graph's

    def note_chosen(self, rows: npt.NDArray[np.int64], rows_X: torch.Tensor | None, choice: TokenChoice) -> None:
        """Record ``choice``, the tokens that ``rows`` decode next; ``rows_X``: the same rows on the device."""
        if rows_X is not None:
            self.chosen.index_copy_(0, rows_X, as_tensor(choice.chosen_X))

    def table_row(self, row: int) -> torch.Tensor:
        """Return int32 [pages_max], the live row. The caller may write it before the next step."""
        return self.table[row]


class HostRows:
    """Rows on a CPU, like ``DeviceRows``, in memory that numpy writes."""

    def __init__(self, rows_max: int, pages_max: int, *, staging_bytes: int) -> None:
        self._table = np.full((rows_max + 1, max(pages_max, 1)), PAD, np.int32)
        self._chosen = np.zeros(rows_max + 1, np.int64)
        self.table = torch.from_numpy(self._table)
        self.chosen = torch.from_numpy(self._chosen)
        self.staging = Staging(torch.device("cpu"), staging_bytes)
        self._steady: SteadyDecodes | None = None
        self._plan: StepPlan | None = None

    def stage(self, plan: StepPlan) -> None:
        # A row that changes hands ends the steady decodes, whose inputs hold its numbers.
        if plan.rows_cleared or plan.admissions:
            self._steady = None
        for cleared in plan.rows_cleared:
            # Before its next sequence writes it (L5).
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

    def note_chosen(self, rows: npt.NDArray[np.int64], rows_X: torch.Tensor | None, choice: TokenChoice) -> None:
        chosen_X = choice.chosen_X
        self._chosen[rows] = chosen_X if isinstance(chosen_X, np.ndarray) else chosen_X.numpy()

    def table_row(self, row: int) -> torch.Tensor:
        self._steady = None
        return self.table[row]


Rows = DeviceRows | HostRows


def rows_on(device: torch.device, *, rows_max: int, pages_max: int, step_tokens_max: int) -> Rows:
    """Return the rows of ``device``. The staging buffer holds a usual step of up to ``step_tokens_max`` tokens."""
    staging_bytes = step_bytes(max(step_tokens_max, rows_max), rows_max, pages_max)
    if is_remote(device):
        return DeviceRows(rows_max, pages_max, device, staging_bytes=staging_bytes)
    assert device.type == "cpu", f"the host cannot write the memory of {device}"
    return HostRows(rows_max, pages_max, staging_bytes=staging_bytes)
