"""Digests of the prefixes of a prompt: equal for equal salt and tokens, in every process.

    tokens    [ page 0 | page 1 | page 2 | tail ]      page: 16 tokens; tail: fewer
    digest    salt --> d0 ------> d1 ------> d2        64 bits, d(k) = d(k - 1) + mixed(page k) x C^k

A digest of a prefix begins with its salt, so prefixes of two salts never have the same one (law L10). It is a sum, so
an engine continues from the digest of any ancestor, and numpy computes all digests of a prompt at once. A list of
Python integers is packed first, which takes half the time of numpy's conversion. Equal digests do not prove equal
tokens. At worst a router misplaces a request: the engine compares the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from weft.units import PAD, PAGE_TOKENS

Digests = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]

_POWER = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT_FIRST, _SHIFT_LAST = np.uint64(29), np.uint64(32)
_POWERS_STEP = 4096


def _odd_words(count: int) -> Digests:
    words = [int.from_bytes(blake2b(bytes([index]), digest_size=8).digest(), "little") | 1 for index in range(count)]
    return np.asarray(words, dtype=np.uint64)


_LANES = _odd_words(PAGE_TOKENS)


@lru_cache(maxsize=1024)
def salt_digest(salt: str) -> int:
    """Return the digest of the empty prefix."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little")


def token_array(tokens: Sequence[int] | Int32s) -> Int32s:
    """Return the tokens as int32 [tokens]."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.int32, copy=False)
    return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), dtype=np.int32)


def prefix_digests(tokens: Sequence[int] | Int32s, salt: str) -> Digests:
    """Return uint64 [pages]: entry k is the digest of the first k + 1 complete pages of ``tokens``."""
    return extended_digests(salt_digest(salt), token_array(tokens), 0)


def extended_digests(digest: int, tokens: Int32s, first_page: int) -> Digests:
    """Return the digests for the complete pages of ``tokens``, which follow ``first_page`` pages with ``digest``."""
    page_count = tokens.size // PAGE_TOKENS
    pages = tokens[: page_count * PAGE_TOKENS].reshape(page_count, PAGE_TOKENS).astype(np.uint64)
    mixed = pages @ _LANES
    mixed ^= mixed >> _SHIFT_FIRST
    mixed *= _MIX
    mixed ^= mixed >> _SHIFT_LAST
    mixed *= _powers(first_page + page_count)[first_page:]
    sums: Digests = np.add.accumulate(mixed)
    sums += np.uint64(digest)
    return sums


def partial_digest(digest: int, tail: Int32s, first_page: int) -> int:
    """Return the digest of a prefix that ends within a page, which is filled up with PAD. ``digest``: of the
    ``first_page`` whole pages."""
    page = np.full(PAGE_TOKENS, PAD, np.int32)
    page[: tail.size] = tail
    return int(extended_digests(digest, page, first_page)[0])


def _powers(count: int) -> Digests:
    """Return the first ``count`` powers of C."""
    return _power_table(-(-max(count, 1) // _POWERS_STEP) * _POWERS_STEP)[:count]


@lru_cache(maxsize=4)
def _power_table(count: int) -> Digests:
    table: Digests = np.cumprod(np.full(count, _POWER, dtype=np.uint64), dtype=np.uint64)
    return table
