"""Hashes of token sequences, which the device of the scripted executor holds instead of numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint64]

MASK = 2**64 - 1
EMPTY = 0xCBF29CE484222325
"""The hash of no tokens."""
UNWRITTEN = np.uint64(0)


class PlanViolation(AssertionError):
    """The plan would make a kernel read or write memory that it must not; the message says which law and where."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise PlanViolation(message)


def digest(before: int, token: int) -> int:
    """Return the hash of a token sequence from the hash of all but its last (FNV-1a over 64-bit words, mixed)."""
    mixed = ((before ^ (token + 1)) * 0x100000001B3) & MASK
    mixed ^= mixed >> 29
    return (mixed * 0xBF58476D1CE4E5B9) & MASK or 1


def digest_of(tokens: Iterable[int]) -> int:
    """Return the hash of a complete token sequence."""
    state = EMPTY
    for token in tokens:
        state = digest(state, token)
    return state
