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

from weft.speculation.choice import SURVIVAL_MIN
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
        self.right: dict[SourceName, list[float]] = {}
        self.tried: dict[SourceName, list[float]] = {source: [GUESS_WEIGHT] * classes for source in SOURCES}
        self.values: dict[SourceName, list[float]] = {}
        """The chance of each class of match length."""
        for source in SOURCES:
            low, high = _GUESSES[source]
            lengths = (0, *_CLASS_ENDS)
            guesses = [low + (high - low) * length / (length + _HALF_MATCH) for length in lengths]
            self.right[source] = [GUESS_WEIGHT * guess for guess in guesses]
            self.values[source] = guesses

    def chance(self, source: SourceName, match: int) -> float:
        return self.values[source][_CLASS_OF[min(match, _CLASS_ENDS[-1])]]


class OwnChances:
    """One source on one sequence."""

    __slots__ = ("_all_right", "_all_tried", "_expected", "_right", "_values")

    def __init__(self, table: Chances, source: SourceName) -> None:
        self._all_right, self._all_tried = table.right[source], table.tried[source]
        self._values = table.values[source]
        self._right = _OWN_WEIGHT
        self._expected = _OWN_WEIGHT

    def survivals(self, proposal: Proposal) -> list[float]:
        """The chance of each token of ``proposal`` that it and all before it are right, up to one that is too
        small to be verified."""
        factor = self._right / self._expected
        values, classes, last = self._values, _CLASS_OF, _CLASS_ENDS[-1]
        survival, match, survivals = 1.0, proposal.match, []
        for _ in proposal.tokens:
            chance = factor * values[classes[match if match < last else last]]
            survival *= chance if chance < _CHANCE_MAX else _CHANCE_MAX
            if survival < SURVIVAL_MIN:
                break
            survivals.append(survival)
            match += 1
        return survivals

    def score(self, proposal: Proposal, tokens: Sequence[int]) -> int:
        """The sequence went on with ``tokens``. Returns how many tokens of ``proposal`` were right."""
        tried, right, values = self._all_tried, self._all_right, self._values
        classes, last, match = _CLASS_OF, _CLASS_ENDS[-1], proposal.match
        own_right, own_expected, equal = self._right, self._expected, 0
        for proposed, token in zip(proposal.tokens, tokens, strict=False):
            is_right = proposed == token
            at = classes[match if match < last else last]
            own_expected = own_expected * _OWN_DECAY + values[at]
            own_right = own_right * _OWN_DECAY + is_right
            tries = tried[at] = tried[at] * _DECAY + 1.0
            rights = right[at] = right[at] * _DECAY + is_right
            chance = rights / tries
            values[at] = chance if chance < _CHANCE_MAX else _CHANCE_MAX
            if not is_right:
                break
            equal += 1
            match += 1
        self._right, self._expected = own_right, own_expected
        return equal
