"""Numbers about the engine: counters since the start, and one value of them that crosses processes.

Counters only grow, so a reader that polls at any interval can take differences. Nothing here is a list that
grows with traffic (law L11). The server makes distributions over requests from events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from weft.costs.step import StepCost
from weft.engine.sleep_state import AWAKE, SleepState
from weft.memory.usage import MemoryUsage
from weft.schedule.tier_values import TierStats
from weft.speculation.proposal import SpeculationStats

if TYPE_CHECKING:
    from weft.schedule.plan import StepPlan


class RankStats(msgspec.Struct, frozen=True):
    """``collective_s``: seconds that rank 0 spent in collectives. ``expert_choices``: by the number of the
    expert, over all layers, where ranks divide experts."""

    size: int = 1
    collective_s: float = 0.0
    expert_choices: list[int] = []


class StepCounts(msgspec.Struct, kw_only=True):
    """What the engine counts as it runs."""

    steps: int = 0
    last_step_tokens: int = 0
    last_step_decodes: int = 0
    last_step_s: float = 0.0
    """Seconds of the last step on the engine's clock, planning and settling included."""

    requests: int = 0
    requests_refused: int = 0
    """Refused because the queue was full."""
    prompt_tokens: int = 0
    """Of accepted requests, once for each of the ``n`` sequences."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied at a first admission."""
    generation_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model, recomputation included."""
    finished: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
    """Sequences that ended, by finish reason."""


class EngineStats(StepCounts, kw_only=True):
    """``running`` and ``waiting`` count sequences; a request of ``n`` is ``n`` of them."""

    running: int
    waiting: int
    rows_max: int
    queue_max: int
    memory: MemoryUsage
    preemptions: int
    recomputed_tokens: int
    sleep: SleepState = AWAKE
    store: TierStats | None = None
    """None without a store."""
    speculation: SpeculationStats = SpeculationStats()
    costs: StepCost | None = None
    """What steps cost, None until enough was measured."""
    ranks: RankStats = RankStats()


class EngineCounters(StepCounts, kw_only=True):
    """``on_step`` listeners get each computed step and its seconds. ``ranks``: what the ranks say, where
    there are several."""

    on_step: list[Callable[[StepPlan, float], None]] = []
    ranks: Callable[[], RankStats] = RankStats

    def step(self, plan: StepPlan, seconds: float) -> None:
        """``plan`` was computed and settled."""
        self.steps += 1
        self.computed_tokens += plan.token_count
        self.last_step_tokens, self.last_step_decodes = plan.token_count, plan.prefills.start
        self.last_step_s = seconds
        for listener in self.on_step:
            listener(plan, seconds)

    def counts(self) -> dict[str, Any]:
        """Every field of ``StepCounts``, for an ``EngineStats``."""
        counts = {name: getattr(self, name) for name in StepCounts.__struct_fields__}
        return counts | {"finished": dict(self.finished)}
