"""Messages between the HTTP process and the engine process: msgpack of these Structs.

    HTTP process                                             engine process
    ------------                                             --------------
    Launch    (stdin, once)      ------------------------->  which engine to build
              <-------------------------------------------   Progress*, then Ready or Fatal
    Submit, Flush, GetCacheShape,
    Sleep, Wake, Pause, Resume,
    UpdateWeights, Reset,
    LoadAdapter, UnloadAdapter,
    PinPrefixes, UnpinPrefixes                   ------------------------->  questions: each has a number ...
              <-------------------------------------------   ... and a Reply in a StepReport
    Cancel, Follow, Stop         ------------------------->  commands without a reply
              <-------------------------------------------   StepReport: at most one message per step
              <-------------------------------------------   Beat: a sign of life, from a thread of its own
              <-------------------------------------------   Fatal: the last message of a dying engine

The engine reads between two steps. A StepReport carries the replies to submits as well as tokens, so the news
of a request arrives in the order of events. HTTP workers say the same to the process with the engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from weft.adapters import Adapter
from weft.engine.stats import EngineStats, Flushed, NamedPrefix, Part, SleepState, WeightsState
from weft.errors import UserError, WeftError
from weft.info import ModelInfo
from weft.kv_events import KvEventsConfig
from weft.request import Request, TokenEvent
from weft.snapshot_report import SnapshotReport


class PeerKeys(msgspec.Struct, frozen=True):
    """Address and token for handoffs. ``host``: the address that other machines reach this one at; ``port`` 0: any free
    one. ``token``: of the fleet."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class RecordingTarget:
    """Where a recording of the traffic goes. ``has_tokens``: prompts and answers too, not only their
    hashes."""

    file: str
    limit_bytes: int
    has_tokens: bool = False


_encoder = msgspec.msgpack.Encoder()


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch of an engine process. ``factory`` is "module:function"; the engine process calls it with an
    EngineConfig of ``config`` and ``on_progress``. ``folder`` has the sockets; the process that ends last removes it.
    ``record``: None for no recording. ``beat_s``: seconds between two beats. ``cores`` and ``ram_share``: the part of
    the machine that is the engine's (``weft.rpc.client.HostShare``). ``memory_turn``: the descriptor of a file that the
    engines of one machine lock in turn (``weft.host``). ``peers``: how engines of other machines reach it, for
    handoffs. ``kv_events``: where it publishes KV events, as engine number ``rank`` of this machine."""

    factory: str
    config: dict[str, Any]
    folder: str
    record: RecordingTarget | None = None
    beat_s: float = 1.0
    cores: tuple[int, ...] = ()
    ram_share: int = 1
    memory_turn: int | None = None
    memory_bytes: int | None = None
    background: bool = False
    peers: PeerKeys | None = None
    kv_events: KvEventsConfig | None = None
    rank: int = 0

    @property
    def commands_address(self) -> str:
        return f"ipc://{self.folder}/commands"

    @property
    def events_address(self) -> str:
        return f"ipc://{self.folder}/events"


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A question. Its reply has no value: the request is accepted."""

    number: int
    request: Request


class Flush(msgspec.Struct, frozen=True, tag=True):
    """A question: drop the cached prefixes, and with ``store`` those on disk. Its reply has no value."""

    number: int
    store: bool = True


class GetCacheShape(msgspec.Struct, frozen=True, tag=True):
    """A question about the contents of the prefix cache. The reply is a ``CacheShape``."""

    number: int


SleepMode = Literal["wait", "abort"]


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """A question; the reply is a ``SleepOutcome``. ``mode``: treatment of running sequences, None to refuse;
    ``timeout_s``: how long to wait for them."""

    number: int
    level: int
    mode: SleepMode | None
    timeout_s: float


class Wake(msgspec.Struct, frozen=True, tag=True):
    """A question; the reply is a ``SleepOutcome``. ``tags`` None brings everything back."""

    number: int
    tags: list[Part] | None


PauseMode = Literal["keep", "wait", "abort"]


class Pause(msgspec.Struct, frozen=True, tag=True):
    """A question: compute no further step. ``mode``: running sequences stay as they are, are waited for, or end. The
    reply is a ``WeightsOutcome``."""

    number: int
    mode: PauseMode
    timeout_s: float
    flush: bool = False


class Resume(msgspec.Struct, frozen=True, tag=True):
    """A question: go on after a pause. The reply is a ``WeightsOutcome``."""

    number: int


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """A question: answer with the weights in ``directory`` from now on. ``mode``: running sequences go on with them,
    are waited for, or end. The reply is a ``WeightsOutcome``."""

    number: int
    directory: str
    version: str
    mode: PauseMode
    timeout_s: float


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """A question: read this adapter and keep it, if it can be served. The reply has no value."""

    number: int
    adapter: Adapter


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """A question: drop the adapter with this digest, unless a live sequence has it. The reply: whether it is
    gone."""

    number: int
    digest: str


class PinPrefixes(msgspec.Struct, frozen=True, tag=True):
    """A question: name these prefixes. The reply is a list of ``PinState``; it ``waits`` until their states are
    durable in the store, or are not to become so."""

    number: int
    named: list[NamedPrefix]
    waits: bool


class UnpinPrefixes(msgspec.Struct, frozen=True, tag=True):
    """A question: forget these names of prefixes. The reply: how many there were."""

    number: int
    names: list[str]


class Follow(msgspec.Struct, frozen=True, tag=True):
    """A command: the next StepReport has a full report of the snapshots, and later ones the changes. ``pages``: of KV
    pages too."""

    pages: bool = False


class Reset(msgspec.Struct, frozen=True, tag=True):
    """A question: cancel every request, and forget unanswered questions. The reply has no value; no event
    of an earlier request follows it. The prefix cache stays."""

    number: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """A command. ``index`` None cancels every sequence of the request."""

    request_id: str
    index: int | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the step that is running."""


Command = (
    Submit
    | Flush
    | GetCacheShape
    | Sleep
    | Wake
    | Pause
    | Resume
    | UpdateWeights
    | LoadAdapter
    | UnloadAdapter
    | PinPrefixes
    | UnpinPrefixes
    | Reset
    | Follow
    | Cancel
    | Stop
)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ``weft.errors`` on the wire, in the terms of HTTP."""

    message: str
    status: int
    kind: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: WeftError) -> Refusal:
        return cls(message=error.message, status=error.status, kind=error.kind, param=error.param, code=error.code)

    def as_error(self) -> UserError:
        """Return a UserError that HTTP and the terminal report as the original would have been."""
        error = UserError(self.message, param=self.param, code=self.code)
        error.status, error.kind = self.status, self.kind
        return error


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the question ``number``: a value in msgpack, whose type the asking side knows, or a
    refusal."""

    number: int
    value: msgspec.Raw
    refusal: Refusal | None = None

    @classmethod
    def of(cls, number: int, value: Any = None) -> Reply:
        return cls(number=number, value=msgspec.Raw(_encoder.encode(value)))

    @classmethod
    def refused(cls, number: int, error: WeftError) -> Reply:
        return cls(number=number, value=msgspec.Raw(_encoder.encode(None)), refusal=Refusal.of(error))


class SleepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The state after a call to sleep or wake up. ``flushed``: losses of the prefix cache."""

    state: SleepState
    flushed: Flushed | None = None


class WeightsOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The state after a pause, its end, or other weights. ``flushed``: losses of the prefix cache."""

    weights: WeightsState
    paused: bool
    flushed: Flushed | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """One line about the progress of the engine's start."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The end of a start. ``stats`` from before the first step, so that /metrics has every gauge from the start; None
    where another process answers /metrics."""

    info: ModelInfo
    stats: EngineStats | None


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The report of a step. ``step_tokens``: tokens computed by each step since the last report (the histogram of
    iteration sizes). ``stats``: the engine's counters, not on every report. ``snapshots``: changes of the prefix cache,
    after a Follow. ``failures``: of requests that had been accepted and get no further event; an engine has none, as a
    failed sequence is an event of it, and a fleet has. ``handoffs``: requests whose records are with the engine that
    goes on, or why they are not. ``weights``: of a fleet, whose HTTP processes get no stats, when they change."""

    replies: list[Reply] = []
    events: list[TokenEvent] = []
    step_tokens: list[int] = []
    stats: EngineStats | None = None
    snapshots: SnapshotReport | None = None
    failures: dict[str, Refusal] = {}
    handoffs: dict[str, str] = {}
    weights: WeightsState | None = None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The process runs. ``step_s``: seconds in the running step; 0 between steps."""

    step_s: float = 0.0


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a dying engine. ``refusal`` is set when the user can do something about it (a bad flag, a bad
    checkpoint)."""

    message: str
    traceback: str = ""
    refusal: Refusal | None = None


Report = Progress | Ready | StepReport | Beat | Fatal
