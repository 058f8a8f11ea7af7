"""Numbers about the engine, as one value that crosses processes: gauges of now, counters since the start.

Counters only grow, so whoever reads them at any interval can take differences. Nothing here is a list
that grows with traffic (law L11); distributions over requests are made by the server from events.
"""

from __future__ import annotations

import msgspec

from weft.engine.sleep import AWAKE, SleepState
from weft.memory.memory import MemoryUsage


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
    """Turned away because the queue was full."""
    prompt_tokens: int
    """Of accepted requests, once for each of the ``n`` sequences."""
    cached_tokens: int
    """Prompt tokens that a first admission found in the prefix cache."""
    generation_tokens: int
    computed_tokens: int
    """Tokens that went through the model, recomputation included."""
    preemptions: int
    recomputed_tokens: int
    finished: dict[str, int]
    """Sequences that ended, by finish reason."""
    sleep: SleepState = AWAKE
