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
              <-------------------------------------------   Beat: a sign of life, from a separate thread
              <-------------------------------------------   Fatal: the last message of a dying engine

The engine reads between two steps. A StepReport carries tokens and the replies to submits, so that everything about a
request arrives in order. HTTP workers exchange the same messages with the process that has the engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Address and token for handoffs. ``host``: this machine's address for other machines; ``port``: 0 for any free
    one. ``token``: of the fleet."""

    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class RecordingTarget:
    """The file of a recording of the traffic. ``has_tokens``: whether it has prompts and answers, not only their
    hashes."""

    file: str
    limit_bytes: int
    has_tokens: bool = False


@dataclass(frozen=True, slots=True)
class HostShare:
    """The part of this machine that an engine may use. ``cores``: the numbers of its cores, empty for all.
    ``ram_share``: number of engines that divide the free RAM. ``environment``: additional variables, such as
    CUDA_VISIBLE_DEVICES. ``memory_turn``: descriptor of a file that engines lock in turn while they choose their
    memory. ``memory_bytes``: for weights and arena together; None: all free memory. ``background``: whether the start
    has a lower priority than other engines. ``peers``: how engines of other machines reach this one. ``kv_events``:
    where KV events are published, as engine number ``rank``."""

    cores: tuple[int, ...] = ()
    ram_share: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_turn: int | None = None
    memory_bytes: int | None = None
    background: bool = False
    peers: PeerKeys | None = None
    kv_events: KvEventsConfig | None = None
    rank: int = 0


ANYWHERE = HostShare()
_encoder = msgspec.msgpack.Encoder()


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The launch of an engine process. ``factory`` is "module:function"; the engine process calls it with an
    EngineConfig of ``config`` and ``on_progress``. ``folder``: of the sockets; the process that ends last removes it.
    ``record``: None for no recording. ``beat_s``: seconds between two beats."""

    factory: str
    config: dict[str, Any]
    folder: str
    record: RecordingTarget | None = None
    beat_s: float = 1.0
    place: HostShare = ANYWHERE

    @property
    def commands_address(self) -> str:
        return f"ipc://{self.folder}/commands"

    @property
    def events_address(self) -> str:
        return f"ipc://{self.folder}/events"


class Question(msgspec.Struct, frozen=True):
    """Base of the questions to an engine. Each gets one ``Reply``, with the same ``number``."""

    number: int


class Submit(Question, frozen=True, tag=True):
    """A question: accept this request. The reply has no value."""

    request: Request


class Flush(Question, frozen=True, tag=True):
    """A question: drop the cached prefixes, and with ``store`` those on disk too. The reply has no value."""

    store: bool = True


class GetCacheShape(Question, frozen=True, tag=True):
    """A question about the contents of the prefix cache. The reply is a ``CacheShape``."""


SleepMode = Literal["wait", "abort"]


class Sleep(Question, frozen=True, tag=True):
    """A question: go to sleep. ``mode``: treatment of running sequences, None to refuse; ``timeout_s``: longest wait
    for them. The reply is a ``SleepOutcome``."""

    level: int
    mode: SleepMode | None
    timeout_s: float


class Wake(Question, frozen=True, tag=True):
    """A question: wake up. ``tags``: the parts to wake, None for all. The reply is a ``SleepOutcome``."""

    tags: list[Part] | None


PauseMode = Literal["keep", "wait", "abort"]


class Pause(Question, frozen=True, tag=True):
    """A question: compute no further step. ``mode``: whether running sequences stay as they are, finish first, or are
    ended. The reply is a ``WeightsOutcome``."""

    mode: PauseMode
    timeout_s: float
    flush: bool = False


class Resume(Question, frozen=True, tag=True):
    """A question: go on after a pause. The reply is a ``WeightsOutcome``."""


class UpdateWeights(Question, frozen=True, tag=True):
    """A question: answer with the weights in ``directory`` from now on. ``mode``: whether running sequences continue
    with these weights, finish first, or are ended. The reply is a ``WeightsOutcome``."""

    directory: str
    version: str
    mode: PauseMode
    timeout_s: float


class LoadAdapter(Question, frozen=True, tag=True):
    """A question: read this adapter and keep it, if it can be served. The reply has no value."""

    adapter: Adapter


class UnloadAdapter(Question, frozen=True, tag=True):
    """A question: drop the adapter with this digest, unless a live sequence has it. The reply says whether it was
    dropped."""

    digest: str


class PinPrefixes(Question, frozen=True, tag=True):
    """A question: name these prefixes. The reply is a list of ``PinState``; with ``waits`` it comes only once each
    state is in the store or cannot be."""

    named: list[NamedPrefix]
    waits: bool


class UnpinPrefixes(Question, frozen=True, tag=True):
    """A question: forget these names of prefixes. The reply is the number of names that existed."""

    names: list[str]


class Follow(msgspec.Struct, frozen=True, tag=True):
    """A command: send a full report of the snapshots with the next StepReport, and changes with later ones. ``pages``:
    report KV pages too."""

    pages: bool = False


class Reset(Question, frozen=True, tag=True):
    """A question: cancel every request, and forget unanswered questions. The reply has no value; no event
    of an earlier request follows it. The prefix cache stays."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """A command: cancel a sequence. ``index``: None for every sequence of the request."""

    request_id: str
    index: int | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """A command: end after the running step."""


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
        """Return a UserError that HTTP and the terminal report like the original error."""
        error = UserError(self.message, param=self.param, code=self.code)
        error.status, error.kind = self.status, self.kind
        return error


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the question ``number``: a value in msgpack, whose type the sender of the question knows, or a
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
    """The end of a start. ``stats``: from before the first step, so that /metrics has every gauge from the start; None
    if another process answers /metrics."""

    info: ModelInfo
    stats: EngineStats | None


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The report of a step. ``step_tokens``: tokens computed by each step since the last report (the histogram of
    iteration sizes). ``stats``: the engine's counters, not on every report. ``snapshots``: changes of the prefix cache,
    after a Follow. ``failures``: errors of accepted requests that get no further event; only a fleet reports these,
    since an engine reports failed sequences as events. ``handoffs``: requests whose records have arrived at the engine
    that continues, or the reason why not. ``weights``: changed weights; only a fleet reports these, to HTTP processes
    that get no stats."""

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
