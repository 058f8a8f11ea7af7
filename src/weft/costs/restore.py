"""Costs of a prefix in seconds: to compute, to restore from a store, to write to the store.

    compute   tokens x seconds of a prefill token x (1 + others)       measured over steps of prefills
    restore   latency + (bytes queued before it + own) / read rate     measured over fetches
              + seconds to copy it into the arena x others
    write     bytes x price of a byte                                  a copy out of the arena

    restore when   restore < compute
    write when     expected uses x (compute - restore) > write

The currency is seconds of waiting, summed over requests. A prefill keeps the device from every *other* request that
decodes or waits. A fetch delays only its own request: the disk works at the same time as the device. So under load a
slower disk pays too. Until something is measured, guesses decide: a store must serve the first prompt after a restart.
Only reads measure the rate of reads, so each declined restore moves it towards its guess: otherwise, after a single
slow read, short prefixes would be computed for ever.

A prefill token is charged the mean of whole steps, at any position of its prompt. So the restore of a long prompt on
an attention model is chosen a little too seldom, never too often. It is not the fit of ``weft.costs.fit``, which
estimates the time that a prefill adds to a step that runs anyway: a restore spares whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.costs.step import Work

PREFILL_TOKENS_MIN = 32
"""Fewest prefill tokens of a step that measures the cost of a token; steps with fewer mostly have the fixed cost."""
READ_BYTES_S = 500e6
COPY_BYTES_S = 5e9
LATENCY_S = 2e-3
DECLINED_READ_S = 1e-3
"""Seconds of the supposed read, at the guessed rate, that a declined restore counts as. After some 20 of them a slow
read counts little, and after 50 nothing: a store that is always slow costs one read for each 50 declined restores."""
PRIOR_USES = 0.5
"""Uses expected of a snapshot that no request has used yet."""
_FADE = 0.9
"""Weight of the sums so far when a measurement arrives."""
_OTHERS_FADE = 0.99


@dataclass(slots=True)
class _Rate:
    """Units per second: a guess until ``add``, then a fading mean."""

    guess: float
    units: float = 0.0
    seconds: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        self.units = _FADE * self.units + units
        self.seconds = _FADE * self.seconds + seconds

    @property
    def per_second(self) -> float:
        return self.units / self.seconds if self.seconds > 0 and self.units > 0 else self.guess


class RestorePrices:
    """Prices of computing, restoring and writing a prefix. ``token_s``: guessed seconds of a prefill token.
    ``copy_bytes_s``: the rate of copies between arena and host.
    """

    def __init__(
        self,
        token_s: float,
        *,
        read_bytes_s: float = READ_BYTES_S,
        latency_s: float = LATENCY_S,
        copy_bytes_s: float = COPY_BYTES_S,
    ) -> None:
        self._tokens = _Rate(1 / token_s)
        self._reads = _Rate(read_bytes_s)
        self._latency_s = latency_s
        self._arrived_s = 0.0
        self.copy_byte_s = 1 / copy_bytes_s
        """Seconds to copy a byte between arena and host."""
        self.mean_others = 0.0
        """Other requests that ran or waited at the admission of a request: a fading mean."""

    def stepped(self, work: Work, seconds: float) -> None:
        """Record that a step of ``work`` took ``seconds``."""
        if work.prefill_tokens >= max(PREFILL_TOKENS_MIN, 4 * work.decodes):
            self._tokens.add(work.prefill_tokens, seconds)

    def admitted(self, others: int) -> None:
        """Record that a request is admitted while ``others`` run or wait."""
        self.mean_others = _OTHERS_FADE * self.mean_others + (1 - _OTHERS_FADE) * others

    def fetched(self, size_bytes: int, began_s: float, arrived_s: float) -> None:
        """Record that a fetch of ``size_bytes`` took from ``began_s`` to ``arrived_s``."""
        # Reads queue after one another: count from the arrival of the fetch before it, if that is later.
        seconds = arrived_s - max(began_s, self._arrived_s)
        self._arrived_s = max(self._arrived_s, arrived_s)
        self._reads.add(size_bytes, max(seconds - self._latency_s, 1e-4))

    def declined(self, restores: int) -> None:
        """Record that ``restores`` requests compute a stored prefix because reading it costs more. Each counts as a
        read at the guessed rate."""
        for _ in range(restores):
            self._reads.add(DECLINED_READ_S * self._reads.guess, DECLINED_READ_S)

    def compute_s(self, start: int, end: int, others: float = 0.0) -> float:
        return (end - start) / self._tokens.per_second * (1.0 + others)

    def restore_s(self, size_bytes: int, *, queued_bytes: int = 0, others: float = 0.0) -> float:
        """Return the seconds to restore ``size_bytes``. ``queued_bytes``: bytes of fetches that are under way."""
        return (
            self._latency_s
            + (queued_bytes + size_bytes) / self._reads.per_second
            + others * size_bytes * self.copy_byte_s
        )

    def saved_s(self, start: int, end: int, size_bytes: int, *, queued_bytes: int = 0, others: float = 0.0) -> float:
        """Return seconds that a restore of [start, end) saves; negative if it costs more."""
        return self.compute_s(start, end, others) - self.restore_s(size_bytes, queued_bytes=queued_bytes, others=others)

    def worth_of_write_s(self, start: int, end: int, read_bytes: int, size_bytes: int, uses: float) -> float:
        """Return the seconds that ``uses`` hits at ``end`` save, minus the seconds of the write. ``start``: position
        at which a request resumes with the present store. ``read_bytes``: bytes that a hit reads in addition to those
        of a request that resumes at ``start``. ``size_bytes``: bytes that are not stored yet.
        """
        others = self.mean_others
        read_s = self.restore_s(read_bytes, others=others) - (self._latency_s if start else 0.0)
        # The disk writes at the same time as the engine computes: a write costs only the copy.
        return uses * (self.compute_s(start, end, others) - read_s) - size_bytes * self.copy_byte_s
