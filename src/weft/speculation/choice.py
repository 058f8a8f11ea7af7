"""Choice of the drafts that a step verifies, by tokens per second, and of when sources are asked at all.

    survival   .97  .95  .93  .90  .82  .60  .55  .31 ...      candidates of all rows, the best first
    tokens     R + .97  + .95 ...                              expected of the step, R rows
    seconds    cost(R + 1), cost(R + 2), ...                   of a step with verify runs of R + 1 rows, ...
               '-- the number that makes tokens / seconds largest

    awake      the drafter proposes and scores         8 steps in a row bring no draft; 2 of many sequences
    asleep     it does nothing, not even per token     until its host time is at most SHARE of all steps
    awake      it catches up with the texts and proposes again

Survivals of one sequence never rise, so the best n of all are always the first drafts of each sequence. All numbers are
tried, not only the next one: cost rises in steps, and four drafts may pay when one does not. A step without drafts is
preferred unless drafts promise GAIN_MIN more: chances and costs are estimates.

Sources cost microseconds for each sequence and step. Compared with a step of 30 ms that is nothing, and the drafter
never sleeps. Compared with a step of 3 ms with 32 sequences it is a tenth. With many sequences rows are dear, so fewer
drafts pay, and CROWD_SHARE holds. Where no draft would pay even if all were right (``may_pay``), the drafter rests for
REST_STEPS at least. A stretch ends with a draft: the time spent before it has paid. Seconds come from outside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from weft.costs.rows import RowCosts
from weft.speculation.drafter import SOURCES, Proposal, SourceName

Learned = TypeVar("Learned")

GUESS_WEIGHT = 8.0
_DECAY = 0.998
_OWN_DECAY = 0.95
_OWN_WEIGHT = 3.0
_CHANCE_MAX = 0.98
_ADAPTERS_MAX = 256
_CLASS_ENDS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
"""Upper ends of the classes of matches, tokens: a match is in the first class whose end is above its length, or in the
last class.
"""
_CLASS_OF = [sum(end <= length for end in _CLASS_ENDS) for length in range(_CLASS_ENDS[-1] + 1)]
_GUESSES: dict[SourceName, tuple[float, float]] = {
    "prediction": (0.3, 0.95),
    "grammar": (0.85, 0.95),
    "tree": (0.6, 0.95),
    "suffix": (0.15, 0.9),
    "mtp": (0.75, 0.75),
}  # unused: the head has its own chances (speculation.mtp)
"""Guessed chance without a match, and after a match of any length; it rises in between."""
_HALF_MATCH = 6.0


class Chances:
    """Chances that a proposed token is right, learned from all sequences of an adapter while serving.

        chance(source, match)     of the next token of a source that had ``match`` tokens right before it
        survival of token i       chance(match) * chance(match + 1) * ... * chance(match + i)

    Each proposal is scored against the tokens of the sequence, whether it was verified or not. So a source whose
    proposals are never drafted is calibrated too, and a probe costs no step. The position in a proposal needs no
    separate table: if i tokens are right, the match is i tokens longer.

    Counts are by source and by class of match length, and they decay: about 500 scored tokens count. A class
    without counts has the source's guess, as if GUESS_WEIGHT tokens had been scored.
    """

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


class ByAdapter(Generic[Learned]):
    """Statistics by adapter digest; "" is the model without an adapter. Drafts that are right for one adapter are wrong
    for another, and new files under an old name start from nothing. The most recently used statistics are kept.
    """

    def __init__(self, begin: Callable[[], Learned]) -> None:
        self._begin = begin
        self._learned: OrderedDict[str, Learned] = OrderedDict()

    def of(self, adapter: str) -> Learned:
        if adapter not in self._learned:
            self._learned[adapter] = self._begin()
            if len(self._learned) > _ADAPTERS_MAX:
                self._learned.popitem(last=False)
        self._learned.move_to_end(adapter)
        return self._learned[adapter]


class OwnChances:
    """Chances of one source on one sequence: a factor on top of the table, since one text repeats itself and another
    does not. The factor is the number of right tokens over the number that the table expected, decayed within about 20
    proposals.
    """

    __slots__ = ("_all_right", "_all_tried", "_expected", "_right", "_values")

    def __init__(self, table: Chances, source: SourceName) -> None:
        self._all_right, self._all_tried = table.right[source], table.tried[source]
        self._values = table.values[source]
        self._right = _OWN_WEIGHT
        self._expected = _OWN_WEIGHT

    def survivals(self, proposal: Proposal) -> list[float]:
        """Return the survival of each token of ``proposal``, the chance that it and all tokens before are right, up to
        the first one that is too small to be verified.
        """
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
        """Score ``proposal`` against ``tokens``, with which the sequence went on. Return how many tokens were right."""
        tried, right, values = self._all_tried, self._all_right, self._values
        classes, last, match = _CLASS_OF, _CLASS_ENDS[-1], proposal.match
        own_right, own_expected, equal = self._right, self._expected, 0
        for proposed, token in zip(proposal.tokens, tokens, strict=False):
            is_right = proposed == token
            match_class = classes[match if match < last else last]
            own_expected = own_expected * _OWN_DECAY + values[match_class]
            own_right = own_right * _OWN_DECAY + is_right
            tries = tried[match_class] = tried[match_class] * _DECAY + 1.0
            rights = right[match_class] = right[match_class] * _DECAY + is_right
            chance = rights / tries
            values[match_class] = chance if chance < _CHANCE_MAX else _CHANCE_MAX
            if not is_right:
                break
            equal += 1
            match += 1
        self._right, self._expected = own_right, own_expected
        return equal


GAIN_MIN = 1.03
SURVIVAL_MIN = 0.05
"""Least survival of a draft that is verified."""
_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of drafts that ``may_pay`` tries; the cost bends at powers of two."""


def choose(survivals: Sequence[Sequence[float]], decodes: int, costs: RowCosts) -> list[int]:
    """Return, for each list of survivals, how many of its drafts to verify. ``decodes``: rows of the step without
    drafts.
    """
    if decodes == 1:
        return [_best_of_one(survivals[0], costs)]
    ranked = sorted(
        ((survival, index) for index, row in enumerate(survivals) for survival in row if survival >= SURVIVAL_MIN),
        key=lambda pair: pair[0],
        reverse=True,
    )
    counts = [0] * len(survivals)
    for _, index in ranked[: _best_number([survival for survival, _ in ranked], decodes, costs)]:
        counts[index] += 1
    return counts


def _best_of_one(survivals: Sequence[float], costs: RowCosts) -> int:
    """Return the number of drafts of a single sequence, the usual case. Its survivals are in order, and the pace of
    the machine changes no comparison.
    """
    if not survivals:
        return 0
    best_rate, best, expected = GAIN_MIN / costs.figure(1), 0, 1.0
    figures = costs.verify_figures(len(survivals))  # or more of them
    for number, (survival, figure) in enumerate(zip(survivals, figures, strict=False), 1):
        if survival < SURVIVAL_MIN:
            break
        expected += survival
        if expected > best_rate * figure:
            best_rate, best = expected / figure, number
    return best


def _best_number(ranked: Sequence[float], decodes: int, costs: RowCosts) -> int:
    """Return how many of the drafts with these survivals, the best first, make tokens per second largest."""
    best_rate, best = GAIN_MIN * decodes / costs.seconds(decodes), 0
    expected = float(decodes)
    for number, survival in enumerate(ranked, 1):
        expected += survival
        seconds = costs.verify_seconds(decodes, number)
        if expected > best_rate * seconds:
            best_rate, best = expected / seconds, number
    return best


def may_pay(decodes: int, drafts_max: int, costs: RowCosts) -> bool:
    """Return whether any number of drafts up to ``drafts_max`` in all would pay, were all of them right."""
    least = GAIN_MIN * decodes / costs.seconds(decodes)
    numbers = [number for number in _NUMBERS if number < drafts_max]
    return any((decodes + number) / costs.verify_seconds(decodes, number) > least for number in (*numbers, drafts_max))


SHARE = 0.01
FEW_SEQUENCES = 4
CROWD_SHARE = 0.005
"""Share of step time, like SHARE, for steps of more than FEW_SEQUENCES."""
BARREN_STEPS = 8
"""Steps of one sequence without drafts that end a stretch."""
_BARREN_STEPS_MIN = 2
SLEEP_STEPS_MAX = 512
REST_STEPS = 32


class HostBudget:
    """Budget of host time for drafts. Begins awake."""

    def __init__(self) -> None:
        self.awake = True
        self._spent_s = 0.0
        self._steps_s = 0.0
        self._barren = 0
        self._share = SHARE
        self._sleep_s = 0.0
        self._sleep_steps = 0
        """Steps left to sleep at most."""
        self._rest_steps = 0
        """Steps left to sleep at least."""

    def spend(self, seconds: float) -> None:
        """Record ``seconds`` of the host or the head that drafts took."""
        self._spent_s += seconds

    def wake(self) -> None:
        """Wake up, and begin a new stretch."""
        self.awake = True
        self._spent_s = self._steps_s = 0.0
        self._barren = 0

    def rest(self) -> None:
        """Sleep, since no draft would pay in the steps to come."""
        self._sleep(max(0.0, self._owed_s))
        self._rest_steps = REST_STEPS

    def step(self, seconds: float, *, drafted: bool, sequences: int = 1) -> None:
        """Record that a step of ``sequences`` took ``seconds``; ``drafted``: it verified drafts."""
        if not self.awake:
            self.sleep_through(1, seconds)
        elif drafted:
            self.wake()
        else:
            self._steps_s += seconds
            self._barren += 1
            self._share = SHARE if sequences <= FEW_SEQUENCES else CROWD_SHARE
            if self._barren >= max(_BARREN_STEPS_MIN, BARREN_STEPS // max(1, sequences)):
                if self._owed_s > 0:
                    self._sleep(self._owed_s)
                else:
                    self.wake()

    def sleep_through(self, steps: int, seconds: float) -> None:
        """Record that ``steps`` steps took ``seconds`` in all. The budget must be asleep."""
        self._sleep_s -= seconds
        self._sleep_steps -= steps
        self._rest_steps -= steps
        if self._sleep_steps <= 0 or (self._sleep_s <= 0 and self._rest_steps <= 0):
            self.wake()

    @property
    def _owed_s(self) -> float:
        """Seconds of steps during which no source is asked, to make up for the time spent."""
        return self._spent_s / self._share - self._steps_s

    def _sleep(self, seconds: float) -> None:
        self.awake = False
        self._sleep_s, self._sleep_steps, self._rest_steps = seconds, SLEEP_STEPS_MAX, 0
