"""Messages between rank 0 and another rank: pickled values over a pair of sockets.

    rank 0    Launch ------------> Layout ---------> StepPlan, StepPlan, ...  Call   Call  Close
    rank r      Present, Loaded, Room --->  Ready                             Done   Done
                       Failed, at any time: why this rank ends

Steps have no reply: the collectives of a step are the reply. Pickle is safe here, because both ends are processes of
one program and one user, and no other process has the sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.config import EngineConfig, Sizes
from weft.memory.frames.plan import ArenaPlan
from weft.memory.reservation import Reservation
from weft.schedule.plan import StepPlan
from weft.spec import ModelSpec
from weft.units import BufferId


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Load the share of rank ``rank`` of ``size``. ``folder``: where ranks meet, private and new.
    ``directory``: the checkpoint's. ``shares_choice``: tokens that rank 0 chose are sent to all ranks."""

    rank: int
    size: int
    config: EngineConfig
    directory: Path
    folder: Path
    shares_choice: bool


@dataclass(frozen=True, slots=True)
class RankPresent:
    """The launch arrived, and this rank is about to meet the others."""


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """The weights are loaded. ``identity``: facts that must be equal on all ranks, each as text."""

    identity: Mapping[str, str]
    spec: ModelSpec
    weights_bytes: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class RankRoom:
    """The memory of a step, in which all ranks take part, is measured. ``room_bytes``: the largest arena that fits next
    to the weights; ``usual_bytes``: the arena without ``--memory``.
    """

    room_bytes: int
    usual_bytes: int


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Allocate the arena."""

    arena: ArenaPlan
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class RankReady:
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Map and pin ``size`` bytes for transfer buffers. The descriptor follows on the socket."""

    size: int


@dataclass(frozen=True, slots=True)
class RankBuffer:
    """Transfer buffer ``buffer`` of ``pages`` pages, from byte ``begin`` of ``RankMemory`` on. None: the buffer has
    memory of its own, whose descriptor follows on the socket.
    """

    buffer: BufferId
    pages: int
    begin: int | None = None


@dataclass(frozen=True, slots=True)
class RankBufferFreed:
    buffer: BufferId


@dataclass(frozen=True, slots=True)
class RankStored:
    """The stores of a plan are in their transfer buffers."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """Call a method of the rank's executor between two steps. The reply is a RankDone."""

    method: Literal["sleep", "read_from", "wake", "change_adapter"]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RankPicture:
    """Rows of a picture that rank 0 has encoded, as ``weft.runner.pictures`` packs them. Without ``data``:
    they are dropped."""

    digest: bytes
    data: bytes = b""
    grids: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RankDone:
    """A call has returned."""


@dataclass(frozen=True, slots=True)
class RankClose:
    """Free everything; another launch may follow."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """``refused``: an error of the user's flags or checkpoint; ``param``: the flag. ``lost_others``: a
    collective failed, so another rank is to blame."""

    message: str
    refused: bool = False
    param: str | None = None
    traceback: str = ""
    lost_others: bool = False


_NO_RESERVATION = Reservation(version=-1, frames=(), pages=(), slots=(), opened=(), extended=(), closed=())


def for_other_ranks(plan: StepPlan) -> StepPlan:
    """Return ``plan`` without grammars (rank 0 chooses tokens) and without the fields that only memory reads."""
    # New pages and frames stay in the plan, because the model's own head zeroes its part of these pages.
    admissions = plan.admissions
    if any(admission.grammar is not None for admission in admissions):
        admissions = tuple(replace(admission, grammar=None) for admission in admissions)
    reserved = plan.reservation
    return replace(
        plan, admissions=admissions, reservation=replace(_NO_RESERVATION, pages=reserved.pages, frames=reserved.frames)
    )
