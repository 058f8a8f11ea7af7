"""What a replay found: one frozen value, the same for the same inputs, down to its hash.

Rates are of prompt tokens of requests that ran. *Saved* seconds are what the cost model says that computing
the cached tokens would have added. Lost tokens matched in part and had to be computed (law L8), by reason; a
sequence that was preempted and comes back is counted again there, as it looks again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.memory.cache import CacheCounts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHARES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; 0 where there is nothing to count."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Floats) -> Percentiles:
        return cls(*(float(one) for one in np.percentile(seconds, SHARES))) if seconds.size else cls(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """By request, in order of arrival: tokens found at the first admission, seconds from the start of the
    trace at which it began, made its first token and ended; NaN where it did not."""

    cached_tokens: Ints
    began_s: Floats
    first_s: Floats
    ended_s: Floats


@dataclass(frozen=True, slots=True)
class Report:
    arm: str
    memory_bytes: int
    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    saved_s: float
    computed_tokens: int
    recomputed_tokens: int
    ttft: Percentiles
    tpot: Percentiles
    running_max: int
    preemptions: int
    steps: int
    virtual_s: float
    busy_s: float
    cache: CacheCounts
    """What memory counted, readmissions of preempted sequences included."""
    states_kept: int
    pages_held_max: int
    slots_held_max: int
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def lost(self) -> dict[str, int]:
        """Tokens by reason."""
        return {name.removeprefix("lost_"): count for name, count in asdict(self.cache).items()
                if name.startswith("lost_")}

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything but the timeline, with the rate and the hash."""
        numbers = {name: value for name, value in asdict(self).items() if name != "timeline"}
        return {**numbers, "hit_rate": self.hit_rate, "hash": self.digest}

    @property
    def digest(self) -> str:
        """Equal for equal runs: of all numbers, and of every request's cached tokens and times."""
        numbers = {name: value for name, value in asdict(self).items() if name != "timeline"}
        hashed = blake2b(json.dumps(numbers, sort_keys=True).encode(), digest_size=16)
        for column in (self.timeline.cached_tokens, self.timeline.began_s, self.timeline.first_s,
                       self.timeline.ended_s):
            hashed.update(np.ascontiguousarray(column).tobytes())
        return hashed.hexdigest()

