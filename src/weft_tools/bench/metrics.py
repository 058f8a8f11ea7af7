"""The standard metrics, from timings.

    TTFT   from sending to the first token                     E2EL   from sending to the last token
    TPOT   (E2EL - TTFT) / (tokens - 1), for two tokens or more
    ITL    each gap between two tokens (tokens of one chunk share the gap before it)

Goodput counts answers within every objective. Failed requests count only in ``failed``. Percentiles interpolate between
neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import ConfigError
from weft_tools.bench.serve import Timing

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
PROMISED = ("ttft", "tpot", "e2el")
"""Metrics of a single request, which objectives (--goodput) can limit."""


@dataclass(frozen=True, slots=True)
class Times:
    """The metrics of one answer, in seconds. ``tpot``: None for an answer of one token."""

    ttft: float
    tpot: float | None
    itl: tuple[float, ...]
    e2el: float


def times_of(timing: Timing) -> Times:
    """Return the metrics of a timing that has chunks and no error."""
    ttft, e2el = timing.first_token_s, timing.chunks[-1][0] - timing.sent
    later = timing.output_tokens - 1
    return Times(ttft, (e2el - ttft) / later if later > 0 else None, tuple(timing.gaps_s), e2el)


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse ["ttft:500", "tpot:50"] as milliseconds by metric. Raise ConfigError."""
    promises: dict[str, float] = {}
    for pair in (part for text in pairs for part in text.split()):
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in PROMISED or not limit > 0:
            raise ConfigError(
                f"--goodput is {pair!r}; it is NAME:MILLISECONDS with a name of "
                f"{', '.join(PROMISED)} and more than 0 milliseconds",
                param="--goodput",
            )
        promises[name] = limit
    return promises


def parse_names(text: str) -> tuple[str, ...]:
    """Parse "ttft,itl" as names of METRICS. Raise ConfigError."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in METRICS:
            raise ConfigError(
                f"--percentile-metrics has {name!r}; it may have {', '.join(METRICS)}", param="--percentile-metrics"
            )
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Parse "50,99.9" as numbers of 0 to 100. Raise ConfigError."""
    percentiles = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise ConfigError(
                f"--metric-percentiles has {part.strip()!r}; it has numbers from 0 to 100, separated by commas",
                param="--metric-percentiles",
            )
        percentiles.append(value)
    return tuple(percentiles)


def keeps(times: Times, promises: Mapping[str, float]) -> bool:
    """Return whether each objective (milliseconds) is met. An answer without a TPOT meets an objective for TPOT."""
    return all((getattr(times, name) or 0.0) * 1e3 <= limit for name, limit in promises.items())


def figures(
    timings: Sequence[Timing],
    seconds: float,
    *,
    names: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (99.0,),
    promises: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return results by the standard keys. ``seconds``: from the first sending to the last end, above 0."""
    done = [timing for timing in timings if timing.error is None and timing.chunks]
    times = [times_of(timing) for timing in done]
    read, generated = (sum(timing.prompt_tokens for timing in done), sum(timing.output_tokens for timing in done))
    accepted, rejected = (
        sum(timing.accepted_drafts for timing in done),
        sum(timing.rejected_drafts for timing in done),
    )
    decoded = generated - len(done)  # the first token of an answer comes from its prefill
    results: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": generated,
        "total_cached_tokens": sum(timing.cached_tokens for timing in done),
        "total_accepted_drafts": accepted,
        "total_rejected_drafts": rejected,
        "acceptance_rate": accepted / (accepted + rejected) if accepted + rejected else None,
        "accepted_length": decoded / (decoded - accepted) if accepted + rejected else None,
        "request_throughput": len(done) / seconds,
        "request_goodput": (sum(keeps(answer_times, promises) for answer_times in times) / seconds)
        if promises
        else None,
        "output_throughput": generated / seconds,
        "total_token_throughput": (read + generated) / seconds,
        "max_output_tokens_per_s": busiest_second(done),
        "max_concurrent_requests": most_at_once(done),
    }
    for name in names:
        values = [value * 1e3 for answer_times in times for value in _values(answer_times, name)]
        results |= _spread(values, name, percentiles)
    return results


def _values(times: Times, name: str) -> tuple[float, ...]:
    value = getattr(times, name)
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _spread(values: list[float], name: str, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles; None without values."""
    spread: dict[str, float | None] = dict.fromkeys(f"{kind}_{name}_ms" for kind in ("mean", "median", "std"))
    spread |= {f"p{percentile:g}_{name}_ms": None for percentile in percentiles}
    if values:
        spread |= {
            f"mean_{name}_ms": float(np.mean(values)),
            f"median_{name}_ms": float(np.median(values)),
            f"std_{name}_ms": float(np.std(values)),
        }
        spread |= {f"p{percentile:g}_{name}_ms": float(np.percentile(values, percentile)) for percentile in percentiles}
    return spread


def busiest_second(timings: Sequence[Timing]) -> int:
    """Return the most tokens that arrived within a second; seconds count from the first sending."""
    if not timings:
        return 0
    began = min(timing.sent for timing in timings)
    by_second: dict[int, int] = {}
    for timing in timings:
        for when, count in timing.chunks:
            second = int(when - began)
            by_second[second] = by_second.get(second, 0) + count
    return max(by_second.values(), default=0)


def most_at_once(timings: Sequence[Timing]) -> int:
    """Return the most requests that were open at the same moment. A request that ends as another begins does not
    overlap it."""
    moves = sorted(
        [(timing.sent, 1) for timing in timings]
        + [(max(timing.ended, timing.chunks[-1][0]), -1) for timing in timings if timing.chunks]
    )
    now = most = 0
    for _, change in moves:
        now += change
        most = max(most, now)
    return most
