"""When an answer ends: by token in the engine, by text where it is detokenized.

    token ids  -> StopRule.reason(token, position)      eos, stop_token_ids, max_tokens, end of context
    text       -> StopStrings.push(piece)           stop strings; text comes out only when it is safe

The two live apart because the engine has no text. The code that detokenizes feeds ``StopStrings``, shows the
text that it returns, and cancels the sequence when it says ``stopped``.

``StopStrings`` runs one KMP automaton per stop string. The state of an automaton is a length: of the longest
suffix of the text that is a prefix of its stop string. Exactly this suffix must be held back, since it may
become the stop. So work per character is constant, and the text held is shorter than the longest stop string
(law L11). The outcome does not depend on how the text was cut into pieces.

Rejected: searching the whole answer after each token (quadratic, and it has already emitted half of the
stop string when it finds it); comparing token ids of the stop string (the same text has many
tokenizations).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.request import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class StopRule:
    """The token-level end of one sequence. ``new_tokens_max`` is ``max_tokens`` or what the context leaves,
    whichever is less; stop ids count only after ``min_tokens`` tokens."""

    ids: frozenset[int]
    named_ids: frozenset[int]
    min_tokens: int
    new_tokens_max: int

    def reason(self, token: int, position: int) -> FinishReason | None:
        """Why the sequence ends with ``token`` as generated token number ``position`` (from 1), or None."""
        if token in self.ids and position > self.min_tokens:
            return "stop"
        return "length" if position >= self.new_tokens_max else None

    def stop_reason(self, token: int) -> int | None:
        """What ``TokenEvent.stop_reason`` says after a "stop": the id, when the request named it."""
        return token if token in self.named_ids else None


def stop_rule(sampling: SamplingParams, eos_ids: Iterable[int], context_left: int) -> StopRule:
    """``context_left``: tokens between the prompt's end and ``max_model_len``."""
    new_tokens_max = context_left if sampling.max_tokens is None else min(sampling.max_tokens, context_left)
    # An end before min_tokens is masked, except where the grammar leaves nothing else: then it is the end.
    min_tokens = sampling.min_tokens if sampling.grammar is None else 0
    return StopRule(ids=_shared(stop_ids(sampling, eos_ids)), named_ids=frozenset(sampling.stop_token_ids),
                    min_tokens=min_tokens, new_tokens_max=new_tokens_max)


@lru_cache(maxsize=256)
def _shared(ids: tuple[int, ...]) -> frozenset[int]:
    """One set for all sequences with the same ends: most have the model's own, and a step reads each."""
    return frozenset(ids)


def stop_ids(sampling: SamplingParams, eos_ids: Iterable[int]) -> tuple[int, ...]:
    """Ids that end the sequence, in order and without repeats: the model's eos (unless ``ignore_eos``)
    and the request's own."""
    ends = () if sampling.ignore_eos else tuple(eos_ids)
    return tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))


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
