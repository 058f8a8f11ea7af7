"""How likely a proposed token is right, learned while serving.

    chance(source, match)     of the next token of a source that had ``match`` tokens right before it
    survival of token i       chance(match) * chance(match + 1) * ... * chance(match + i)

Each proposal is scored against what the sequence said, whether it was verified or not. So a source that is
never drafted from is calibrated all the same, and a probe costs no step. The position in a proposal needs no
table of its own: if i tokens are right, the match is i tokens longer, and the next proposal would begin
there.

Counts are by source and by class of match length, and they decay: about 500 scored tokens count. Each
sequence has a factor for each source on top, since one text repeats itself and another does not. It is the
tokens that were right over those that the table expected, decayed within about 20 proposals.

A class without counts has the source's guess, as if GUESS_WEIGHT tokens had been scored.

Rejected: the acceptance of drafts alone (it says nothing about a source that is off); a chance by token
(a vocabulary of rows that are never full).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.speculation.proposal import SOURCES, Proposal, SourceName

GUESS_WEIGHT = 8.0
_DECAY = 0.998
_OWN_DECAY = 0.95
_OWN_WEIGHT = 3.0
_CHANCE_MAX = 0.98
_CLASS_ENDS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
"""A match of ``length`` tokens is in the first class whose end is above it, or in the last class."""
_CLASS_OF = [sum(end <= length for end in _CLASS_ENDS) for length in range(_CLASS_ENDS[-1] + 1)]
_GUESSES: dict[SourceName, tuple[float, float]] = {
    "prediction": (0.3, 0.95), "grammar": (0.85, 0.95), "tree": (0.6, 0.95), "suffix": (0.15, 0.9),
    "mtp": (0.75, 0.75)}   # of no use: the head has chances of its own (speculation.mtp)
"""The chance without a match, and after a match of any length; it rises in between."""
_HALF_MATCH = 6.0


class Chances:
    """Of all sequences."""

    def __init__(self) -> None:
        classes = len(_CLASS_ENDS) + 1
        self._right: dict[SourceName, list[float]] = {}
        self._tried: dict[SourceName, list[float]] = {source: [GUESS_WEIGHT] * classes for source in SOURCES}
        self.values: dict[SourceName, list[float]] = {}
        """The chance of each class of match length."""
        for source in SOURCES:
            low, high = _GUESSES[source]
            lengths = (0, *_CLASS_ENDS)
            guesses = [low + (high - low) * length / (length + _HALF_MATCH) for length in lengths]
            self._right[source] = [GUESS_WEIGHT * guess for guess in guesses]
            self.values[source] = guesses

    def chance(self, source: SourceName, match: int) -> float:
        return self.values[source][_CLASS_OF[min(match, _CLASS_ENDS[-1])]]

    def score(self, source: SourceName, match: int, right: bool) -> float:
        """A token after ``match`` right ones was ``right`` or not. Returns its chance before."""
        at = _CLASS_OF[match if match < _CLASS_ENDS[-1] else _CLASS_ENDS[-1]]
        tries, rights, values = self._tried[source], self._right[source], self.values[source]
        expected = values[at]
        tries[at] = tries[at] * _DECAY + 1.0
        rights[at] = rights[at] * _DECAY + right
        chance = rights[at] / tries[at]
        values[at] = chance if chance < _CHANCE_MAX else _CHANCE_MAX
        return expected


class OwnChances:
    """One source on one sequence."""

    __slots__ = ("_expected", "_right", "_source", "_table")

    def __init__(self, table: Chances, source: SourceName) -> None:
        self._table = table
        self._source = source
        self._right = _OWN_WEIGHT
        self._expected = _OWN_WEIGHT

    def survivals(self, proposal: Proposal) -> list[float]:
        """The chance of each token of ``proposal`` that it and all before it are right."""
        factor = self._right / self._expected
        values, last = self._table.values[self._source], _CLASS_ENDS[-1]
        survival, match, survivals = 1.0, proposal.match, []
        for _ in proposal.tokens:
            chance = factor * values[_CLASS_OF[match if match < last else last]]
            survival *= chance if chance < _CHANCE_MAX else _CHANCE_MAX
            survivals.append(survival)
            match += 1
        return survivals

    def score(self, proposal: Proposal, tokens: Sequence[int]) -> int:
        """The sequence went on with ``tokens``. Returns how many tokens of ``proposal`` were right."""
        table, source, match = self._table, self._source, proposal.match
        equal = 0
        for proposed, token in zip(proposal.tokens, tokens, strict=False):
            right = proposed == token
            self._expected = self._expected * _OWN_DECAY + table.score(source, match + equal, right)
            self._right = self._right * _OWN_DECAY + right
            if not right:
                break
            equal += 1
        return equal
