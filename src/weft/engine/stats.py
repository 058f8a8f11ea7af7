"""Numbers about the engine, and sleep: values that cross processes.

                weights              arena, cached prefixes   back by
    awake       where they compute   in memory
    level 1     in host memory       gone                     a copy, and an allocation
    level 2     gone                 gone                     reading the checkpoint, and an allocation

Counters only grow, so a reader that polls at any interval can take differences. Nothing here is a list that
grows with traffic (law L11). The server makes distributions over requests from events.
``weft.engine.sleeper`` acts on sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from weft.costs.step import StepCost
from weft.engine.adapters import AdapterStats
from weft.errors import AsleepError, RequestError
from weft.handoff import LinkStats
from weft.kv_events import KvEventStats
from weft.memory.usage import MemoryUsage
from weft.schedule.tier_values import TierStats
from weft.speculation.drafter import SpeculationStats

if TYPE_CHECKING:
    from weft.schedule.plan import StepPlan

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "kv_cache")
"""Parts of the engine in the order of waking. ``kv_cache`` is the arena, recurrent states included."""
LEVELS = (1, 2)


class SleepState(msgspec.Struct, frozen=True):
    """Whether the engine sleeps. ``level`` 0: awake, and nothing is ``missing``."""

    level: int = 0
    missing: tuple[Part, ...] = ()

    def check_awake(self) -> None:
        """Raise AsleepError unless the engine is awake."""
        if self.level:
            raise AsleepError(
                f"the engine is asleep (level {self.level}); POST /wake_up, or wake_up() in Python, wakes it",
                code="asleep",
            )


AWAKE = SleepState()


class WeightsState(msgspec.Struct, frozen=True):
    """The weights that answer now. ``version``: a name that the caller of the last update gave them, empty for those of
    the start. ``digest``: of all bytes of their files. ``updates``: number of changes to other weights."""

    version: str = ""
    digest: str = ""
    updates: int = 0


class Flushed(msgspec.Struct, frozen=True):
    """Dropped contents of the prefix cache: bytes of pages and states, tokens of prefixes."""

    bytes: int = 0
    tokens: int = 0


class NamedPrefix(msgspec.Struct, frozen=True):
    """A prefix to pin. ``salt``: that of ``Request.salt``; ``tokens``: int32 bytes."""

    name: str
    salt: str
    tokens: bytes


class PinState(msgspec.Struct, frozen=True):
    """Tokens of a pinned prefix up to its deepest snapshot in memory, and whether the snapshot of all of them is
    durable in the store. ``nbytes``: KV and state of it."""

    name: str
    tokens: int
    is_stored: bool
    nbytes: int


def check_level(level: int) -> None:
    """Raise RequestError for an unknown level."""
    if level not in LEVELS:
        raise RequestError(
            f"level is {level}; it may be 1 (weights go to host memory) or 2 (weights are "
            "dropped, and read again on waking)",
            param="level",
        )


def check_parts(parts: Collection[str] | None) -> Collection[str]:
    """Return ``parts``, or all of them for None. Raise RequestError for an unknown part."""
    for part in parts or ():
        if part not in PARTS:
            raise RequestError(f"tags has {part!r}; it may have {' and '.join(PARTS)}", param="tags")
    return parts or PARTS


class RankStats(msgspec.Struct, frozen=True):
    """Counters of one rank. ``collective_s``: seconds that rank 0 spent in collectives. ``expert_choices``: by the
    number of the expert, over all layers, where ranks divide experts."""

    size: int = 1
    collective_s: float = 0.0
    expert_choices: list[int] = []


class PictureStats(msgspec.Struct, frozen=True):
    """Counts of pictures since the start: ``encoded``, ``reused`` where the rows were present, ``dropped`` for others.
    ``bytes``: of the rows that are kept now, of ``budget`` at most; 0 for a model that reads text only. ``waiting``:
    sequences that wait for their pictures."""

    encoded: int = 0
    reused: int = 0
    dropped: int = 0
    bytes: int = 0
    waiting: int = 0
    budget: int = 0


class StepCounts(msgspec.Struct, kw_only=True):
    """Counters of a running engine."""

    steps: int = 0
    last_step_decodes: int = 0

    requests: int = 0
    requests_refused: int = 0
    """Refused because the queue was full."""
    prompt_tokens: int = 0
    """Prompt tokens of accepted requests, once for each of the ``n`` sequences."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied at a first admission."""
    generation_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, recomputation included."""
    finished: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0)
    )
    """Sequences that ended, by finish reason."""


class EngineStats(StepCounts, kw_only=True):
    """Numbers of an engine. ``running`` and ``waiting`` count sequences; a request of ``n`` is ``n`` of them."""

    running: int
    waiting: int
    rows_max: int
    queue_max: int
    memory: MemoryUsage
    preemptions: int
    recomputed_tokens: int
    sleep: SleepState = AWAKE
    weights: WeightsState = WeightsState()
    paused: bool = False
    store: TierStats | None = None
    """None without a store."""
    speculation: SpeculationStats = SpeculationStats()
    pictures: PictureStats = PictureStats()
    costs: StepCost | None = None
    """Fitted cost of steps, None until enough was measured."""
    ranks: RankStats = RankStats()
    steps_by_form: dict[str, int] = {}
    """Steps of a GPU: ``graph``, or the reason for which they were launched from Python; empty without graphs."""
    adapters: AdapterStats = AdapterStats()
    link: LinkStats | None = None
    """Counters of handoffs; None where there are none."""
    kv_events: KvEventStats | None = None
    """Counters of KV events; None where none are published."""


class EngineCounters(StepCounts, kw_only=True):
    """Counters that an engine adds to. ``on_step`` listeners get each computed step and its seconds: measured, or
    computed by ``priced_s``. ``ranks``: counters of the ranks, where there are several. ``steps_by_form``: see
    ``EngineStats``."""

    on_step: list[Callable[[StepPlan, float], None]] = []
    ranks: Callable[[], RankStats] = RankStats
    steps_by_form: Callable[[], dict[str, int]] = dict
    priced_s: Callable[[StepPlan, float], float] | None = None

    def step(self, plan: StepPlan, seconds: float) -> None:
        """Count ``plan``, which was computed and settled."""
        self.steps += 1
        self.computed_tokens += plan.token_count
        self.last_step_decodes = plan.prefills.start
        if self.priced_s is not None:
            seconds = self.priced_s(plan, seconds)
        for listener in self.on_step:
            listener(plan, seconds)

    def counts(self) -> dict[str, Any]:
        """Return every field of ``StepCounts``, for an ``EngineStats``."""
        counts = {name: getattr(self, name) for name in StepCounts.__struct_fields__}
        return counts | {"finished": dict(self.finished)}
