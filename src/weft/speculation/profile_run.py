"""Measurement of the costs of steps when an engine starts.

    one sequence without a client         steps with 0 0 0 1 3 7 15 drafts, some rounds
    drafts                                one token, again and again: right or wrong, the step costs the same

The profile run is a drafter whose draft counts fill the table. The caller runs an engine with it until ``measured`` is
complete. Counts take turns, so a busy moment hits them alike. The least of a few seconds counts: the first step of a
shape may compile or touch memory for the first time. The last of several plain steps in a row reuse structures that
earlier ones built. A larger model is measured in fewer rounds (ROUNDS_MIN), and a model whose steps take LONG_STEP_S
once for each of LONG_DRAFT_COUNTS: noise is a small part of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.speculation.drafter import DraftRow

DRAFT_COUNTS = (0, 0, 0, 1, 3, 7, 15)
LONG_DRAFT_COUNTS = (0, 3, 15)
_ROUNDS = 6
ROUNDS_MIN = 2
SECONDS_MAX = 0.4
LONG_STEP_S = 0.1
PROFILE_TOKENS = _ROUNDS * sum(1 + count for count in DRAFT_COUNTS) + 80
"""Most tokens of the answer of a profile run, if all drafts are right."""
_TOKEN = 0


class ProfileRun:
    """A ``Drafter`` of one sequence. ``head_drafts``: most drafts of the model's own head, 0 without one."""

    awake = True

    def __init__(self, head_drafts: int = 0) -> None:
        self._left = list(DRAFT_COUNTS) * _ROUNDS
        self._seconds: dict[int, float] = {}
        self._head_round = list(range(1, head_drafts + 1))
        self._head_left = self._head_round * _ROUNDS
        self._head_seconds: dict[int, float] = {}
        self._spent_s = 0.0

    @property
    def complete(self) -> bool:
        return not self._left and not self._head_left

    @property
    def plain(self) -> dict[int, float]:
        """Seconds of a step without drafts, by its rows."""
        return {1: self._seconds[0]} if 0 in self._seconds else {}

    @property
    def verify_runs(self) -> dict[int, float]:
        """Seconds of a step with drafts, by its rows."""
        return {1 + drafts: seconds for drafts, seconds in self._seconds.items() if drafts}

    @property
    def head_measured(self) -> dict[int, float]:
        """Seconds of the model's own head by its drafts."""
        return dict(self._head_seconds)

    def wake(self, *_: object, **__: object) -> None:
        """Do nothing: the profile run never sleeps, and its text does not matter."""

    begin = settle = offer = sleep_through = forget = end = wake

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        count = self._left[0] if self._left else 0
        return {row.key: (_TOKEN,) * min(count, row.limit) for row in rows if count}

    def observe(self, decodes: int, drafted: int, seconds: float, *, prefills: bool = False) -> None:
        if prefills or not self._left:
            return
        if drafted == self._left[0]:
            if seconds > LONG_STEP_S and not self._seconds:
                self._left[1:] = sorted(set(LONG_DRAFT_COUNTS) - {drafted})
                self._head_left = list(self._head_round)
            self._seconds[drafted] = min(seconds, self._seconds.get(drafted, seconds))
        # A draft count that the planner does not allow is tried as often as the others, then skipped.
        self._next(self._left, len(DRAFT_COUNTS), seconds)

    def head_drafts(self, sequences: int, *, prompts: bool) -> int | None:
        return self._head_left[0] if self._head_left and not self._left else None

    def observe_head(self, sequences: int, drafts: int, seconds: float, *, prefills: bool = False) -> None:
        if not prefills and self._head_left:
            self._head_seconds[drafts] = min(seconds, self._head_seconds.get(drafts, seconds))
            self._next(self._head_left, len(self._head_round), seconds)

    def _next(self, left: list[int], size: int, seconds: float) -> None:
        """Record that a step of ``seconds`` measured the first of ``left``, whose rounds have ``size`` counts."""
        self._spent_s += seconds
        del left[0]
        rounds = _ROUNDS - len(left) // size
        if not len(left) % size and rounds >= ROUNDS_MIN and self._spent_s > SECONDS_MAX:
            left.clear()
        if not left:
            self._spent_s = 0.0
