"""What a replay of several replicas found: hits, times and loads, one row for each router.

The *load* of a replica is the tokens that it computed: cached ones cost it nothing. ``load_max_share`` is the
highest load over the mean. Times count from the arrival of a request to its first token, through deaths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from weft.sim.report import Percentiles, Timeline


@dataclass(frozen=True, slots=True)
class PlayedReplica:
    """One replica, all engines that it had. ``requests`` were placed on it."""

    requests: int
    computed_tokens: int
    busy_s: float
    evicted_states: int


@dataclass(frozen=True, slots=True)
class FleetReplayReport:
    """``predicted_tokens``: cached tokens that the router expected, 0 for a router that expects nothing;
    ``admitted_tokens``: those that engines had for the same requests. ``resumes``: requests that went to
    another engine after a death."""

    router: str
    replicas: tuple[PlayedReplica, ...]
    memory_bytes: int
    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    predicted_tokens: int
    admitted_tokens: int
    kills: int
    resumes: int
    ttft: Percentiles
    tpot: Percentiles
    virtual_s: float
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def load_max_share(self) -> float:
        loads = [replica.computed_tokens for replica in self.replicas]
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    @property
    def prediction_error(self) -> float:
        """Share of the engines' cached tokens that the router had wrong, in sum."""
        if not self.predicted_tokens:
            return 0.0
        return abs(self.predicted_tokens - self.admitted_tokens) / max(1, self.admitted_tokens)

    @property
    def digest(self) -> str:
        """Equal for equal runs."""
        hashed = blake2b(digest_size=16)
        for column in (self.timeline.cached_tokens, self.timeline.began_s, self.timeline.first_s,
                       self.timeline.ended_s):
            hashed.update(np.ascontiguousarray(column).tobytes())
        return hashed.hexdigest()

    def to_json(self) -> dict[str, Any]:
        numbers = {name: value for name, value in asdict(self).items() if name != "timeline"}
        return {**numbers, "hit_rate": self.hit_rate, "load_max_share": self.load_max_share,
                "hash": self.digest}
