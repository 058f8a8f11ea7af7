"""Rows of the executor: the page table, the token that each row chose last, and the step's staging buffer.

    stage(plan)      clear rows, write and patch the table, take the arena work          before ``send``
    perform(arena)   what is left of it, and the arena work in its one order             after ``send``
    store(arena)     the arena work that comes after the runs
    steady(plan)     inputs that go on from the step before, where there are such

``HostRows`` writes tables in place, ``DeviceRows`` by a copy. The executor decides once which one it has
(``rows_on``), and the batch builder does not ask.

Laws: L4 (one extra row stays PAD: it is the row of every PAD run); L5 (a cleared row is PAD before its next
sequence writes it); L6 and L7 (the order of ``ArenaWork``).

Rejected: one class with a table that is None on a device (four methods asked which of two machines they are).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from weft.runner.arena import DeviceArena
from weft.runner.decodes import SteadyDecodes
from weft.runner.device_rows import DeviceRows
from weft.runner.host_rows import HostRows
from weft.runner.sampler import TokenChoice
from weft.runner.staging import Staging, step_bytes
from weft.schedule.plan import StepPlan
from weft.tensor.device import is_remote


class Rows(Protocol):
    @property
    def table(self) -> torch.Tensor:
        """int32 [rows_max + 1, pages_max]; the last row is that of every PAD run."""
        ...

    @property
    def chosen(self) -> torch.Tensor:
        """int64 [rows_max + 1]: the token that each row chose last."""
        ...

    @property
    def staging(self) -> Staging: ...

    def stage(self, plan: StepPlan) -> None:
        """Take what ``plan`` changes in rows and arena, once ``staging`` has begun."""
        ...

    def perform(self, arena: DeviceArena) -> None:
        """Apply what was staged, once ``staging`` is sent."""
        ...

    def store(self, arena: DeviceArena) -> None:
        """Apply the staged work that comes after the runs."""
        ...

    def steady(self, plan: StepPlan) -> SteadyDecodes | None:
        """The inputs of ``plan`` if it is of decodes alone and they can go on from step to step."""
        ...

    def note_chosen(self, rows: npt.NDArray[np.int64], rows_X: torch.Tensor | None,
                    choice: TokenChoice) -> None:
        """``choice`` is what ``rows`` decode next; ``rows_X``: the same rows on the device."""
        ...

    def table_row(self, row: int) -> torch.Tensor:
        """int32 [pages_max], the live row. The caller may write it before the next step."""
        ...


def rows_on(device: torch.device, *, rows_max: int, pages_max: int, step_tokens_max: int) -> Rows:
    """The staging buffer holds a usual
    step of up to ``step_tokens_max`` tokens."""
    staging_bytes = step_bytes(max(step_tokens_max, rows_max), rows_max, pages_max)
    if is_remote(device):
        return DeviceRows(rows_max, pages_max, device, staging_bytes=staging_bytes)
    assert device.type == "cpu", f"the host cannot write the memory of {device}"
    return HostRows(rows_max, pages_max, staging_bytes=staging_bytes)
