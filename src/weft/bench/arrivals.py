"""Arrival times of requests: all at once, or at a rate, evenly, at random, or in bursts.

    burstiness    gaps are gamma distributed with this shape and mean 1 / rate
    1             a Poisson process              below 1: bursts and pauses         above 1: more even gaps
"""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float = 1.0, *, seed: int = 0) -> list[float]:
    """Seconds after the start at which each of ``count`` requests arrives, the first at 0. ``rate`` per
    second, infinity for all at once; both above 0."""
    assert rate > 0 < burstiness
    if math.isinf(rate):
        return [0.0] * count
    dice = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += dice.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
