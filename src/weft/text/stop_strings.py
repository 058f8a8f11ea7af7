"""Texts that mean something in a stream which arrives in pieces: stop strings, and the markers of formats.

    text  -> StopStrings.push(piece)           text comes out only when no stop string can begin in it
    "so 2 < 3 </th"  -> held_characters        readers of ``</think>`` and calls show "so 2 < 3 ", hold "</th"

The engine ends answers by token (``weft.engine.submission``) and has no text. The code that detokenizes feeds
``StopStrings``, shows the text that it returns, and cancels the sequence when it says ``stopped``.

There is one KMP automaton per stop string. The state of an automaton is a length: of the longest suffix of
the text that is a prefix of its stop string. Exactly this suffix must be held back, since it may become the
stop. So work per character is constant, and the text held is shorter than the longest stop string (law L11).
The outcome does not depend on how the text was cut into pieces.

Rejected: searching the whole answer after each token (quadratic, and it has already emitted half of the
stop string when it finds it); comparing token ids of the stop string (the same text has many
tokenizations).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache


class StopStrings:
    """Cuts a stream of text at the first of several stop strings.

    The first is the one whose *end* comes first; of those that end together, the longest. ``include``
    keeps the stop string in the text. After a match ``stopped`` is the stop string, and further text is
    dropped.
    """

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops", "stopped")

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        """Raises ValueError for an empty stop string (``SamplingParams.check`` refuses it earlier)."""
        # Longest first, so that of stops which end together the first one found is the longest.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        if any(not stop for stop in self._stops):
            raise ValueError("a stop string is empty")
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """New text of the answer -> the text that is now safe to show (of this and earlier pieces)."""
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        first_new = len(self._held)
        for at in range(first_new, len(pending)):
            matched = self._advance(pending[at])
            if matched is not None:
                self.stopped, self._held = matched, ""
                end = at + 1
                return pending[:end] if self._include else pending[:end - len(matched)]
        safe = len(pending) - max(self._states)
        self._held = pending[safe:]
        return pending[:safe]

    def flush(self) -> str:
        """The answer is over: the text that was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        for which, stop in enumerate(self._stops):
            state = self._states[which]
            failure = self._failures[which]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            self._states[which] = state
            if state == len(stop):
                return stop
        return None


@lru_cache(maxsize=256)
def _failure_table(stop: str) -> Sequence[int]:
    """KMP: for each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = table[length - 1]
        if stop[at] == stop[length]:
            length += 1
        table[at] = length
    return table


def held_characters(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is a beginning of a marker, but not all of it."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of ``markers`` begins, and which; of those that begin together, the longest."""
    best: tuple[int, str] | None = None
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (best is None or at < best[0] or (at == best[0] and len(marker) > len(best[1]))):
            best = at, marker
    return best


def may_become(text: str, markers: Iterable[str]) -> bool:
    """Whether more text could make ``text`` begin with one of ``markers``."""
    return any(marker.startswith(text) and marker != text for marker in markers)
