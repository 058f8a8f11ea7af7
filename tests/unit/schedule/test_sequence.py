"""A sequence whose hidden rows are asked for: which runs have some, and what may come from the cache."""

from __future__ import annotations

import numpy as np
import pytest

from weft.request import Pooling, SamplingParams
from weft.schedule.sequence import Sequence
from weft.units import SeqId

TOKENS = np.arange(10, dtype=np.int32)


def sequence(pooling: Pooling | None) -> Sequence:
    sampling = SamplingParams(max_tokens=0)
    return Sequence(SeqId(1), prompt=TOKENS, sampling=sampling, seed=0, stop_ids=(), rank=(0, 0, 0), pooling=pooling)


@pytest.mark.parametrize(
    ("pooling", "ends", "reused"),
    [
        (None, (), 10),
        (Pooling(kind="last"), (10,), 10),
        (Pooling(kind="mean"), range(1, 11), 0),
        (Pooling(kind="mean", skip=4), (5, 6, 7, 8, 9, 10), 4),
    ],
)
def test_the_rows_of_a_mean_are_all_behind_what_it_skips(
    pooling: Pooling | None, ends: tuple[int, ...], reused: int
) -> None:
    one = sequence(pooling)
    assert [end for end in range(1, 11) if one.pools(end)] == list(ends)
    assert one.reusable(TOKENS).size == reused
