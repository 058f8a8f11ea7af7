"""Numbers about the engine: counters since the start, and one value of them that crosses processes.

Counters only grow, so a reader that polls at any interval can take differences. Nothing here is a list that
grows with traffic (law L11). The server makes distributions over requests from events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from weft.costs.step import StepCost
from weft.engine.sleep_state import AWAKE, SleepState
from weft.memory.usage import MemoryUsage
from weft.schedule.tier_stats import TierStats
from weft.speculation.stats import SpeculationStats

if TYPE_CHECKING:
    from weft.schedule.plan import StepPlan


class RankStats(msgspec.Struct, frozen=True):
    """``collective_s``: seconds that rank 0 spent in collectives. ``expert_choices``: by the number of the
    expert, over all layers, where ranks divide experts."""

    size: int = 1
    collective_s: float = 0.0
    expert_choices: list[int] = []


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """``running`` and ``waiting`` count sequences; a request of ``n`` is ``n`` of them."""

    running: int
    waiting: int
    rows_max: int
    queue_max: int
    memory: MemoryUsage

    steps: int
    last_step_tokens: int
    last_step_decodes: int
    last_step_s: float
    """Seconds of the last step on the engine's clock, planning and settling included."""

    requests: int
    requests_refused: int
    """Refused because the queue was full."""
    prompt_tokens: int
    """Of accepted requests, once for each of the ``n`` sequences."""
    cached_tokens: int
    """Prompt tokens that the prefix cache supplied at a first admission."""
    generation_tokens: int
    computed_tokens: int
    """Tokens that went through the model, recomputation included."""
    preemptions: int
    recomputed_tokens: int
    finished: dict[str, int]
    """Sequences that ended, by finish reason."""
    sleep: SleepState = AWAKE
    store: TierStats | None = None
    """None without a store."""
    speculation: SpeculationStats = SpeculationStats()
    costs: StepCost | None = None
    """What steps cost, None until enough was measured."""
    ranks: RankStats = RankStats()


class EngineCounters:
    """The counters that ``EngineStats`` reports under the same names. ``on_step`` listeners get each computed
    step and its seconds. ``ranks``: what the ranks say, where there are several."""

    def __init__(self) -> None:
        self.on_step: list[Callable[[StepPlan, float], None]] = []
        self.ranks: Callable[[], RankStats] = RankStats
        self.steps = 0
        self.last_step: tuple[int, int, float] = (0, 0, 0.0)
        """Tokens, decodes and seconds."""
        self.requests = 0
        self.requests_refused = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.computed_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}

    def step(self, plan: StepPlan, seconds: float) -> None:
        """``plan`` was computed and settled."""
        self.steps += 1
        self.computed_tokens += plan.token_count
        self.last_step = plan.token_count, plan.prefills.start, seconds
        for listener in self.on_step:
            listener(plan, seconds)
