"""Pooled prompts without a model: the hidden row of a position is made of the digest of the tokens up to it.

``pooled_parts`` is the result of an executor for a run, ``expected_pooled`` the result for the client. The latter is
computed from all rows of the prompt at once, so a row that was left out, counted twice or of another prefix is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.support.digests import EMPTY, digest
from weft.request import Pooling
from weft.units import CHUNK_TOKENS

WIDTH = 4


def hidden_row(state: int, width: int = WIDTH) -> npt.NDArray[np.float64]:
    """Return a row of whole numbers, so that every order of a sum has the same bits."""
    return np.array([(digest(state, 0xE0 + at) >> 20) % 1000 - 500 for at in range(width)], dtype=np.float64)


def pooled_parts(digests: Sequence[int], start: int, length: int, pooling: Pooling) -> npt.NDArray[np.float64]:
    """Return the parts of a run's pooling. ``digests[p]``: of tokens [0, p]."""
    end = start + length
    if pooling.kind == "token":
        return np.array([hidden_row(digests[at], 1 if pooling.score else WIDTH) for at in range(start, end)])
    if pooling.kind == "last":
        width = len(pooling.tokens) or (1 if pooling.score else WIDTH)
        return hidden_row(digests[end - 1], width)[None]
    sums, begin = [], max(start, pooling.skip)
    while begin < end:
        stop = min(end, (begin // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        sums.append(np.sum([hidden_row(digests[at]) for at in range(begin, stop)], axis=0))
        begin = stop
    return np.array(sums)


def expected_pooled(prompt: Sequence[int], pooling: Pooling) -> bytes:
    state, digests = EMPTY, []
    for token in prompt:
        state = digest(state, token)
        digests.append(state)
    if pooling.kind in ("last", "token"):
        value = pooled_parts(digests, 0, len(prompt), pooling)
    else:
        rows = [hidden_row(one) for one in digests[pooling.skip :]]
        value = np.sum(rows, axis=0) / len(rows)
    return bytes(value.astype("<f4").tobytes())
