"""From versions of the books to seconds: how long ago a commit was, by samples of the clock.

    version   0   90   180   ...        noted at most once a second, the last SAMPLES_MAX of them (law L11)
    seconds   0    1     2

Memory counts commits and knows no clock; a version between two samples is as old as the sample before it.
What is older than the oldest sample is that old at least.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

SAMPLES_MAX = 4096
SAMPLE_EVERY_S = 1.0


class Ages:
    """Fed with the clock at commits."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)

    def note(self, version: int, now_s: float) -> None:
        """The books are at ``version`` now."""
        samples = self._samples
        if not samples or now_s - samples[-1][1] >= SAMPLE_EVERY_S:
            samples.append((version, now_s))

    def seconds_since(self, version: int, now_s: float) -> float:
        samples = self._samples
        if not samples:
            return 0.0
        at = bisect_right(samples, version, key=lambda sample: sample[0]) - 1
        return max(0.0, now_s - samples[max(at, 0)][1])
