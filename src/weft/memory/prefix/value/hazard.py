"""The hazard: the learned rate at which states are used again, by kind and age, times a factor for their features.

    hazard(kind, age, features) = rate[kind][age bin]  x  product of factor[kind, feature, bucket]

    rate   = (uses + PRIOR_USES) / (exposure + PRIOR_USES / prior rate)        exposure in seconds x factors
    factor = (uses + PRIOR_FACTOR) / (expected uses + PRIOR_FACTOR)            expected by everything else

    index(age) = max over T of   P(used within T)  /  E[time held until used or given up at T]

    kind      END     where an answer ended: the next turn of a conversation continues there
              LAST    near the end of a prompt: the same question again, or another answer
              WAY     on the path through a prompt: shared beginnings
              USED    any of them after its first use, and places where prompts are known to part

    of a new one     length of the prompt           log2: one-shot requests of a service often share a length
                     share that was known           eighths: a mostly known prompt is in a conversation
                     length of the answer           log2, if a request ended there
    of a used one    times used                     1, 2, 3, 4-7, 8-15, more
                     mean time between uses         log2 of seconds
                     kind at its creation           a continued END is seldom asked for again
                     turn                           answers of the conversation before it

This is a Poisson regression. Its coefficients are updated one at a time by observed over expected uses, each with a
gamma prior: a feature without information stays at 1, and nothing has a learning rate. Evicted states add exposure as
long as they are remembered; without that a policy would learn only from the states that it chose to keep. Age bins
double, from one second to some ten minutes. The prior falls with age like the gaps of anything that spans many scales
(0.2 / (age + 60 s)). Buckets of features are few, because each is learned from scratch on live traffic.

``index_table`` is the Gittins index: the best bargain from an age on, over all times at which to give up. Per
byte and seconds saved, keeping the highest index is the optimal rule for choosing among such waits one at a
time (Gittins, 1979; its use for caches of known hazards is folklore).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR_USES = 2.0
PRIOR_FACTOR = 2.5
FACTOR_MAX = 64.0
NO_CODE = 0
"""Code of an absent feature: its factor is always 1."""

_BINS = 11
EDGES: Floats = np.concatenate([[0.0], 2.0 ** np.arange(_BINS - 1)])
"""Start of each age bin, seconds; the last has no end."""
WIDTHS: Floats = np.append(np.diff(EDGES), EDGES[-1])
_ENDS: Floats = np.append(EDGES[1:], np.inf)
_ENDS_LIST: list[float] = _ENDS.tolist()
_LAST_END = float(EDGES[-1] + WIDTHS[-1])


def bin_of(age_s: float) -> int:
    """Return the bin of an age in seconds."""
    return min(_BINS - 1, int(age_s).bit_length())


def bins_of(ages_s: Floats) -> Ints:
    bins: Ints = np.clip(np.frexp(ages_s)[1], 0, _BINS - 1).astype(np.int64)
    return bins


def seconds_by_bin(since_s: Floats, until_s: Floats) -> Floats:
    """Return [rows, bins]: the part of the ages [since, until) in each bin."""
    spent: Floats = np.clip(until_s[:, None], EDGES, _ENDS) - np.clip(since_s[:, None], EDGES, _ENDS)
    return spent


def prior_rates() -> Floats:
    """Return the uses per second that are assumed before any observation."""
    rates: Floats = 0.2 / (EDGES + WIDTHS / 2 + 60.0)
    return rates


class Hazard:
    """The learned hazard. ``kinds`` and ``codes``: their counts. NO_CODE means no feature."""

    __slots__ = ("_code_expected", "_code_uses", "_exposure", "_prior", "_uses", "factors", "rates")

    def __init__(self, kinds: int, codes: int) -> None:
        self._prior = prior_rates()
        self._uses = np.zeros((kinds, _BINS))
        self._exposure = np.zeros((kinds, _BINS))
        self._code_uses = np.zeros(codes)
        self._code_expected = np.zeros(codes)
        self.rates: Floats = np.tile(self._prior, (kinds, 1))
        """[kinds, bins], uses per second; as of the last ``learn``."""
        self.factors: Floats = np.ones(codes)
        """[codes]; as of the last ``learn``."""

    def factor_of(self, codes: tuple[int, ...]) -> float:
        """Return the product of the factors of ``codes``, clipped to FACTOR_MAX."""
        product = 1.0
        for code in codes:
            product *= float(self.factors[code])
        return min(FACTOR_MAX, max(1 / FACTOR_MAX, product))

    def factors_of(self, codes: Ints) -> Floats:
        """Return the factors, [rows], for [rows, features]."""
        products: Floats = np.clip(self.factors[codes].prod(axis=1), 1 / FACTOR_MAX, FACTOR_MAX)
        return products

    def uses_from(self, kind: int, age_s: float, factor: float) -> float:
        """Return the expected uses from ``age_s`` on, up to the end of the last bin."""
        age_bin = bin_of(age_s)
        left_s = max(0.0, min(_ENDS_LIST[age_bin], _LAST_END) - age_s)
        return factor * float(
            self.rates[kind, age_bin] * left_s + self.rates[kind, age_bin + 1 :] @ WIDTHS[age_bin + 1 :]
        )

    def waited(self, kinds: Ints, codes: Ints, factors: Floats, since_s: Floats, until_s: Floats) -> None:
        """Count that records with ``kinds`` [rows], ``codes`` [rows, features] and ``factors`` [rows] were not used
        between the ages ``since_s`` and ``until_s`` [rows]."""
        weighted = seconds_by_bin(since_s, until_s) * factors[:, None]
        for kind in range(len(self.rates)):
            self._exposure[kind] += weighted[kinds == kind].sum(axis=0)
        expected = (weighted * self.rates[kinds]).sum(axis=1)
        for column in codes.T:
            self._code_expected += np.bincount(column, expected / self.factors[column], minlength=self.factors.size)

    def one_waited(self, kind: int, codes: tuple[int, ...], factor: float, since_s: float, until_s: float) -> None:
        """Count ``waited`` of one record, in a tenth of the time."""
        expected, age_bin = 0.0, bin_of(since_s)
        while since_s < until_s:
            end_s = min(until_s, _ENDS_LIST[age_bin])
            self._exposure[kind, age_bin] += (end_s - since_s) * factor
            expected += (end_s - since_s) * float(self.rates[kind, age_bin])
            since_s, age_bin = end_s, age_bin + 1
        for code in codes:
            self._code_expected[code] += expected * factor / self.factors[code]

    def used(self, kind: int, codes: tuple[int, ...], age_s: float) -> None:
        """Count a use of one record at age ``age_s``."""
        self._uses[kind, bin_of(age_s)] += 1.0
        for code in codes:
            self._code_uses[code] += 1.0

    def learn(self) -> None:
        """Turn the counts into rates and factors."""
        self.rates = (self._uses + PRIOR_USES) / (self._exposure + PRIOR_USES / self._prior)
        self.factors = (self._code_uses + PRIOR_FACTOR) / (self._code_expected + PRIOR_FACTOR)
        self.factors[NO_CODE] = 1.0


def index_table(rates: Floats, widths: Floats, factors: Floats) -> Floats:
    """Return float64 [factors, ages]: the index per second at the beginning of each age bin. The hazard is ``rates``
    (float64 [ages], uses per second in each bin) times a factor of ``factors`` (float64 [factors]).
    ``widths``: seconds of each bin, float64 [ages]."""
    hazard = factors[:, None] * rates
    nothing = np.zeros((len(factors), 1))
    survived = np.exp(-np.concatenate([nothing, np.cumsum(hazard * widths, axis=1)], axis=1))
    spent = (survived[:, :-1] - survived[:, 1:]) / hazard
    seconds_held = np.concatenate([nothing, np.cumsum(spent, axis=1)], axis=1)
    used = survived[:, :-1, None] - survived[:, None, 1:]
    waited = seconds_held[:, None, 1:] - seconds_held[:, :-1, None]
    later = np.triu(np.ones((len(rates), len(rates)), dtype=np.bool_))
    bargains = np.where(later, used, 0.0) / np.where(later, np.maximum(waited, 1e-300), 1.0)
    best: Floats = bargains.max(axis=2)
    return best


FEATURES_MAX = 4
_CODES_PER_KIND = 64
_FIRST, _SECOND, _THIRD, _FOURTH = 1, 22, 40, 45
_LENGTH_BITS, _SHARES, _GAP_BITS, _ANSWER_BITS, _TURNS = 20, 8, 16, 20, 15

Codes = tuple[int, int, int, int]


class Kind(IntEnum):
    END = 0
    LAST = 1
    WAY = 2
    USED = 3


CODE_COUNT = _CODES_PER_KIND * len(Kind)


def codes_of_new(kind: Kind, *, prompt_tokens: int, known_tokens: int, answer_tokens: int | None) -> Codes:
    """Return the codes of a state before its first use. ``known_tokens``: how much of the prompt was seen before.
    ``answer_tokens`` None: the request continues."""
    first = kind * _CODES_PER_KIND
    share = min(_SHARES, known_tokens * _SHARES // max(1, prompt_tokens))
    answer = NO_CODE
    if answer_tokens is not None:
        answer = first + _THIRD + min(_ANSWER_BITS, answer_tokens.bit_length())
    length = first + _FIRST + min(_LENGTH_BITS, prompt_tokens.bit_length())
    return length, first + _SECOND + share, answer, NO_CODE


def codes_of_used(*, uses: int, mean_gap_s: float | None, origin: Kind, turn: int) -> Codes:
    """Return the codes of a state after ``uses`` uses. ``mean_gap_s``: mean seconds between them, None if unknown.
    ``origin``: its kind at creation. ``turn``: the turn of its conversation then, 0 for the first."""
    first = Kind.USED * _CODES_PER_KIND
    gap = 0 if mean_gap_s is None else 1 + min(_GAP_BITS, int(mean_gap_s + 1).bit_length())
    return (
        first + _FIRST + _uses_bucket(uses),
        first + _SECOND + gap,
        first + _THIRD + origin,
        first + _FOURTH + min(_TURNS, turn),
    )


def _uses_bucket(uses: int) -> int:
    return uses if uses < 4 else min(6, uses.bit_length() + 1)
