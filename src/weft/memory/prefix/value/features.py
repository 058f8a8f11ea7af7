"""Features of a checkpoint when it is added or used, as kinds and small buckets. Pure functions, no names.

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

Every count is by kind, so a bucket means one thing. Buckets are few, because each one is learned from scratch
on live traffic.
"""

from __future__ import annotations

from enum import IntEnum

from weft.memory.prefix.value.hazard import NO_CODE

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
    """Codes of a state before its first use. ``known_tokens``: how much of the prompt was seen before.
    ``answer_tokens`` None: the request continues."""
    first = kind * _CODES_PER_KIND
    share = min(_SHARES, known_tokens * _SHARES // max(1, prompt_tokens))
    answer = NO_CODE
    if answer_tokens is not None:
        answer = first + _THIRD + min(_ANSWER_BITS, answer_tokens.bit_length())
    length = first + _FIRST + min(_LENGTH_BITS, prompt_tokens.bit_length())
    return length, first + _SECOND + share, answer, NO_CODE


def codes_of_used(*, uses: int, mean_gap_s: float | None, origin: Kind, turn: int) -> Codes:
    """Codes of a state after ``uses`` uses. ``mean_gap_s``: mean seconds between them, None if unknown.
    ``origin``: its kind at creation. ``turn``: the turn of its conversation then, 0 for the first."""
    first = Kind.USED * _CODES_PER_KIND
    gap = 0 if mean_gap_s is None else 1 + min(_GAP_BITS, int(mean_gap_s + 1).bit_length())
    return (first + _FIRST + _uses_bucket(uses), first + _SECOND + gap, first + _THIRD + origin,
            first + _FOURTH + min(_TURNS, turn))


def _uses_bucket(uses: int) -> int:
    return uses if uses < 4 else min(6, uses.bit_length() + 1)
