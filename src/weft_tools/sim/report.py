"""The results of a replay: one frozen value, the same for the same inputs, down to its hash.

Rates are of prompt tokens of requests that ran. *Saved* seconds: the time to compute the cached tokens, by the cost
model. Lost tokens matched in part and had to be computed (law L8), by reason; a preempted sequence is counted again,
since it looks up its prefix again.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from math import ceil, log
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.memory.frames.plan import ArenaPlan
from weft.memory.usage import STORE_COUNTS, CacheCounts, MemoryUsage
from weft_tools.sim.store_tier import StoreReport
from weft_tools.sim.traffic import Traffic

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SHARES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in seconds; 0 where there is nothing to count."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Floats) -> Percentiles:
        return cls(*(float(value) for value in np.percentile(seconds, SHARES))) if seconds.size else cls(0, 0, 0)


class Gaps:
    """Seconds between two tokens of an answer, as a histogram whose bins are 2 % wide."""

    _LEAST_S, _WIDTH = 1e-5, 1.02

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[ceil(log(max(seconds, self._LEAST_S) / self._LEAST_S, self._WIDTH))] += count

    def percentiles(self) -> Percentiles:
        """Return the percentiles, to 2 %."""
        if not self._counts:
            return Percentiles(0, 0, 0)
        bins = np.asarray(sorted(self._counts))
        passed = np.cumsum([self._counts[int(bin_number)] for bin_number in bins])
        share_bins = [bins[np.searchsorted(passed, share / 100 * passed[-1])] for share in SHARES]
        return Percentiles(*(self._LEAST_S * self._WIDTH ** float(bin_number) for bin_number in share_bins))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Values by request, in order of arrival: tokens found at the first admission, seconds from the start of the trace
    at which it began, made its first token and ended; NaN where it did not."""

    cached_tokens: Ints
    began_s: Floats
    first_s: Floats
    ended_s: Floats

    def digest(self, numbers: bytes = b"") -> str:
        """Return a digest that is equal for equal runs: a hash of ``numbers`` and of every request's cached tokens and
        times."""
        hashed = blake2b(numbers, digest_size=16)
        for column in (self.cached_tokens, self.began_s, self.first_s, self.ended_s):
            hashed.update(np.ascontiguousarray(column).tobytes())
        return hashed.hexdigest()

    def served(self, traffic: Traffic) -> dict[str, Any]:
        """Return the fields of a report that follow from the times of its requests."""
        ran, first = ~np.isnan(self.began_s), ~np.isnan(self.first_s)
        prompts = np.asarray([request.prompt_tokens for request in traffic.requests], dtype=np.int64)
        outputs = np.asarray([request.output_tokens for request in traffic.requests], dtype=np.int64)
        arrivals = np.asarray([request.at_s for request in traffic.requests])
        several = first & (outputs > 1) & ~np.isnan(self.ended_s)
        return {
            "timeline": self,
            "requests": int(ran.sum()),
            "prompt_tokens": int(prompts[ran].sum()),
            "cached_tokens": int(self.cached_tokens.sum()),
            "ttft": Percentiles.of((self.first_s - arrivals)[first]),
            "tpot": Percentiles.of(((self.ended_s - self.first_s) / np.maximum(outputs - 1, 1))[several]),
        }


@dataclass(slots=True)
class MeanBytes:
    """Uses of the arena's bytes, averaged over time. ``leased_ahead``: KV of running sequences that is not computed
    yet. ``cached_*``: exact, and read by no sequence; ``open``: holes
    in frames; ``free``: for either kind."""

    running_kv: float = 0.0
    leased_ahead: float = 0.0
    running_states: float = 0.0
    cached_kv: float = 0.0
    cached_states: float = 0.0
    compressed_kv: float = 0.0
    compressed_states: float = 0.0
    open: float = 0.0
    free: float = 0.0
    seconds: float = 0.0
    """Seconds over which the means are taken."""

    def add(self, now: MeanBytes) -> None:
        """Add ``now``, which held for ``now.seconds``."""
        self.seconds += now.seconds
        if self.seconds > 0:
            share = now.seconds / self.seconds
            for use in fields(self)[:-1]:
                mean = getattr(self, use.name)
                setattr(self, use.name, mean + share * (getattr(now, use.name) - mean))


def bytes_by_use(usage: MemoryUsage, plan: ArenaPlan, pages_ahead: int, seconds: float) -> MeanBytes:
    """Return the bytes by use. ``pages_ahead``: leased and not begun."""
    page, slot = plan.page_bytes, plan.slot_stride_bytes
    ahead = pages_ahead * page
    return MeanBytes(
        running_kv=(usage.pages_held - usage.pages_cached + usage.pages_shared) * page - ahead,
        leased_ahead=ahead,
        running_states=(usage.slots_held - usage.slots_cached) * slot,
        cached_kv=(
            (usage.pages_cached - usage.pages_shared) * page - usage.compressed_bytes - usage.compressed_kv_bytes
        ),
        cached_states=usage.slots_cached * slot,
        compressed_kv=usage.compressed_kv_bytes,
        compressed_states=usage.compressed_bytes,
        open=usage.open_bytes,
        free=usage.free_bytes,
        seconds=seconds,
    )


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
    """Counters of memory, readmissions of preempted sequences included."""
    states_saved: int
    pages_held_max: int
    slots_held_max: int
    mean_bytes: MeanBytes = field(repr=False, compare=False)
    timeline: Timeline = field(repr=False, compare=False)
    store: StoreReport | None = None

    @property
    def net_saved_s(self) -> float:
        """``saved_s`` less the seconds that fetches from the store took."""
        return self.saved_s - (self.store.fetch_s if self.store is not None else 0.0)

    @property
    def lost(self) -> dict[str, int]:
        """Tokens by reason."""
        return asdict(self.cache.lost)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return everything but the timeline, with the rate and the hash."""
        numbers = {**self._numbers(), "mean_bytes": asdict(self.mean_bytes)}
        if self.store is not None:
            numbers["net_saved_s"] = self.net_saved_s
        return {**numbers, "hit_rate": self.hit_rate, "hash": self.digest}

    @property
    def digest(self) -> str:
        """``Timeline.digest`` of all numbers. Names are not part of it, so a renamed field or policy changes
        no hash."""
        numbers = [
            _without_store(value) if name == "cache" else value
            for name, value in self._numbers().items()
            if name != "arm"
        ]
        return self.timeline.digest(json.dumps(_without_names(numbers)).encode())

    def _numbers(self) -> dict[str, Any]:
        left_out = ("timeline", "mean_bytes", *(() if self.store is not None else ("store",)))
        numbers = {name: value for name, value in asdict(self).items() if name not in left_out}
        return numbers | {"cache": self.cache.numbers()}


def _without_store(counts: dict[str, int]) -> dict[str, int]:
    """Return the counters of a cache without a store: its hash is that of a build that knows no store."""
    return {name: count for name, count in counts.items() if name not in STORE_COUNTS or count}


def _without_names(value: Any) -> Any:
    """Return ``value`` with dicts as lists of their values, in order."""
    if isinstance(value, dict):
        return [_without_names(member) for member in value.values()]
    return [_without_names(member) for member in value] if isinstance(value, list | tuple) else value
