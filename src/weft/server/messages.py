"""What the HTTP process and the engine process say to each other: msgpack of these Structs.

    HTTP process                                             engine process
    ------------                                             --------------
    Launch    (stdin, once)      ------------------------->  which engine to build
              <-------------------------------------------   Progress*, then Ready or Fatal
    Submit, Cancel, Flush,
    Look, Sleep, Wake, Stop      ------------------------->  read between two steps
              <-------------------------------------------   StepReport: all that a step brought, at most
                                                             one message per step
              <-------------------------------------------   Fatal: the last message of a dying engine

One StepReport carries the answers to submits as well as tokens, so that the order in which a request's
news arrive is the order in which they happened: accepted (or rejected), then its events.

Rejected: pickle (ten times slower for these shapes, and it runs code), and one message per token
event (256 wake-ups of the event loop per step instead of one).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.engine.sleep_state import Flushed, Part, SleepState
from weft.engine.stats import EngineStats
from weft.errors import UserError, WeftError
from weft.info import ModelInfo
from weft.memory.prefix.shape import CacheShape
from weft.request import Request, TokenEvent


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """``factory`` is "module:function"; called with an EngineConfig of ``config`` and ``on_progress``.
    ``folder`` has the sockets; whoever goes last removes it. ``record``: file and most bytes of a
    recording."""

    factory: str
    config: dict[str, Any]
    folder: str
    record: tuple[str, int] | None = None

    @property
    def commands_address(self) -> str:
        return f"ipc://{self.folder}/commands"

    @property
    def events_address(self) -> str:
        return f"ipc://{self.folder}/events"


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """``index`` None cancels every sequence of the request."""

    request_id: str
    index: int | None = None


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Drop what the prefix cache holds; ``number`` comes back in ``StepReport.flushed``."""

    number: int


class Look(msgspec.Struct, frozen=True, tag=True):
    """What is the shape of the prefix cache? Answered in ``StepReport.shapes``, with ``number``."""

    number: int


SleepMode = Literal["wait", "abort"]


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Answered in ``StepReport.sleep``, with ``number``. ``mode``: what to do while something runs, None to
    refuse; ``timeout_s``: how long to wait."""

    number: int
    level: int
    mode: SleepMode | None
    timeout_s: float


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Answered in ``StepReport.sleep``. ``tags`` None brings everything back."""

    number: int
    tags: list[Part] | None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the step that is running."""


Command = Submit | Cancel | Flush | Look | Sleep | Wake | Stop


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ``weft.errors`` on the wire, by what HTTP says of it."""

    message: str
    status: int
    kind: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: WeftError) -> Refusal:
        return cls(message=error.message, status=error.status, kind=error.kind, param=error.param,
                   code=error.code)

    def as_error(self) -> UserError:
        """A UserError that HTTP and the terminal report as the original would have been."""
        error = UserError(self.message, param=self.param, code=self.code)
        error.status, error.kind = self.status, self.kind
        return error


class SleepNews(msgspec.Struct, frozen=True, kw_only=True):
    """Where a call to sleep or wake up left the engine. ``flushed``: what the cache lost by it."""

    number: int
    state: SleepState
    flushed: Flushed | None = None
    refusal: Refusal | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """One line about what the engine does while it starts."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """``stats`` as they are before the first step, so that /metrics has every gauge from the start."""

    info: ModelInfo
    stats: EngineStats


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """``step_tokens``: tokens computed by each step since the last report (the histogram of iteration
    sizes). ``stats``: the engine's counters, not on every report."""

    accepted: list[str] = []
    rejected: list[tuple[str, Refusal]] = []
    flushed: list[int] = []
    shapes: list[tuple[int, CacheShape]] = []
    sleep: list[SleepNews] = []
    events: list[TokenEvent] = []
    step_tokens: list[int] = []
    stats: EngineStats | None = None


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``refusal`` is set when the user can do something about it (a bad flag, a bad checkpoint)."""

    message: str
    traceback: str = ""
    refusal: Refusal | None = None


Report = Progress | Ready | StepReport | Fatal
