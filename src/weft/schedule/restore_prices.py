"""What a prefix costs in seconds: to compute, to restore from a store, to write there.

    compute   tokens x seconds of a prefill token        measured over steps of prefills
    restore   latency + bytes / read rate                 measured over fetches, from request to arrival
    write     bytes x price of a byte                     a copy out of the arena; more while writes queue

    restore when   restore_s(bytes) < compute_s(start, end)
    write when     expected uses x (compute_s - restore_s) > write_s

Until something is measured, guesses decide: the first prompt after a restart is the one that a store is for.
Measurements fade, so a disk or a GPU that others use counts as slow while it is slow.

The disk writes beside the engine, so its seconds are not the engine's: an idle disk costs the copy alone.
When --store-write lets candidates queue, one write delays another. The price of a byte then rises with each
look, until the least valuable candidates are skipped. It falls again once the queue is short.

A prefill token is charged the mean, wherever it lies. So a long prompt on an attention model is charged too
little, and its restore is chosen a little too seldom, never too often.

Rejected: the fit of the cache policy (it knows ratios, not seconds, until long prompts were measured); bytes
/ --store-write as the price of a write (a GPU would never store what a disk of 200 MB/s writes for free).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.schedule.work import Work

PREFILL_TOKENS_MIN = 32
"""Steps with fewer prefill tokens measure the fixed cost of a step."""
READ_BYTES_S = 500e6
COPY_BYTES_S = 5e9
LATENCY_S = 2e-3
PRIOR_USES = 0.5
"""Uses expected of a checkpoint that no request has used yet."""
_PRICE_STEP = 1.1
"""How much the price of a byte changes with a look at a candidate."""
_FADE = 0.9
"""Weight of the sums so far when a measurement arrives."""


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
    """``token_s``: guessed seconds of a prefill token. ``copy_bytes_s``: the rate of copies out of the
    arena."""

    def __init__(self, token_s: float, *, read_bytes_s: float = READ_BYTES_S, latency_s: float = LATENCY_S,
                 copy_bytes_s: float = COPY_BYTES_S) -> None:
        self._tokens = _Rate(1 / token_s)
        self._reads = _Rate(read_bytes_s)
        self._latency_s = latency_s
        self._copy_byte_s = 1 / copy_bytes_s
        self.byte_price_s = self._copy_byte_s
        """Seconds that writing a byte costs now."""

    def stepped(self, work: Work, seconds: float) -> None:
        """A step of ``work`` took ``seconds``."""
        if work.prefill_tokens >= max(PREFILL_TOKENS_MIN, 4 * work.decodes):
            self._tokens.add(work.prefill_tokens, seconds)

    def fetched(self, size_bytes: int, seconds: float) -> None:
        """A fetch of ``size_bytes`` arrived after ``seconds``."""
        self._reads.add(size_bytes, max(seconds - self._latency_s, 1e-4))

    def queued(self, *, long: bool) -> None:
        """Another candidate is looked at. ``long``: candidates queue because writes are slower."""
        self.byte_price_s = max(self._copy_byte_s,
                                self.byte_price_s * (_PRICE_STEP if long else 1 / _PRICE_STEP))

    @property
    def read_bytes_s(self) -> float:
        return self._reads.per_second

    def compute_s(self, start: int, end: int) -> float:
        return (end - start) / self._tokens.per_second

    def restore_s(self, size_bytes: int) -> float:
        return self._latency_s + size_bytes / self._reads.per_second

    def saved_s(self, start: int, end: int, size_bytes: int) -> float:
        """Seconds that a restore of [start, end) saves; negative if it takes longer."""
        return self.compute_s(start, end) - self.restore_s(size_bytes)

    def is_worth_writing(self, start: int, end: int, size_bytes: int, hits: int) -> bool:
        """``hits``: uses of the checkpoint so far. The store has everything up to ``start``."""
        gain_s = (PRIOR_USES + hits) * self.saved_s(start, end, size_bytes)
        return gain_s > size_bytes * self.byte_price_s
