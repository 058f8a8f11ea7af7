"""The costs of steps, measured when an engine starts: a rehearsal in place of a guess.

    a sequence of its own, no client      steps with 0, 1, 3, 7 and 15 drafts, some of each
    drafts                                one token, again and again: right or wrong, the step costs the same

The rehearsal is a drafter that drafts what the table needs. The caller runs an engine with it until
``measured`` is complete, and gives the figures to the engine that serves. Counts take turns, so
a busy moment hits them alike. The least of a few seconds counts: the first step of a shape may compile or
touch memory for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.speculation.drafter import DraftGrammar, DraftRow

DRAFT_COUNTS = (0, 1, 3, 7, 15)
_STEPS_EACH = 6
REHEARSAL_TOKENS = _STEPS_EACH * sum(1 + count for count in DRAFT_COUNTS) + 80
"""Answer tokens that a rehearsal takes at most, were all drafts right."""
_TOKEN = 0


class Rehearsal:
    """A ``Drafter`` of one sequence. ``head_drafts``: most drafts of the model's own head, 0 without one."""

    def __init__(self, head_drafts: int = 0) -> None:
        self._left = list(DRAFT_COUNTS) * _STEPS_EACH
        self._seconds: dict[int, float] = {}
        self._head_left = list(range(1, head_drafts + 1)) * _STEPS_EACH
        self._head_seconds: dict[int, float] = {}

    @property
    def complete(self) -> bool:
        return not self._left and not self._head_left

    @property
    def measured(self) -> dict[int, float]:
        """Seconds of a step by its rows."""
        return dict(self._seconds)

    @property
    def head_measured(self) -> dict[int, float]:
        """Seconds of the model's own head by its drafts."""
        return dict(self._head_seconds)

    def begin(self, key: int, tokens: Sequence[int], *, prompt_length: int, salt: str | None,
              prediction: Sequence[int] | None, grammar: DraftGrammar | None = None) -> None:
        """The rehearsal needs no text."""

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        count = self._left[0] if self._left else 0
        return {row.key: (_TOKEN,) * min(count, row.limit) for row in rows if count}

    def settle(self, key: int, tokens: Sequence[int], *, drafted: int, accepted: int) -> None:
        """What was right is no matter."""

    def observe(self, decodes: int, drafted: int, seconds: float) -> None:
        if self._left and drafted == self._left[0]:
            self._seconds[1 + drafted] = min(seconds, self._seconds.get(1 + drafted, seconds))
        if self._left:
            # A count that the planner does not let through is tried as often as the others, and left out.
            del self._left[0]

    def head_drafts(self, sequences: int, *, prompts: bool) -> int | None:
        return self._head_left[0] if self._head_left and not self._left else None

    def offer(self, key: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """What the head expects is no matter."""

    def observe_head(self, sequences: int, drafts: int, seconds: float) -> None:
        self._head_seconds[drafts] = min(seconds, self._head_seconds.get(drafts, seconds))
        if self._head_left:
            del self._head_left[0]

    def end(self, key: int) -> None:
        """The sequence was never remembered."""
