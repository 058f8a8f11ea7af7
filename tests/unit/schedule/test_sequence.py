"""A sequence: which of its runs have hidden rows that are asked for, and what is looked up in the cache for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.memory.values import NO_NODE
from weft.request import Pooling, SamplingParams
from weft.schedule.reuse import Reuse
from weft.schedule.rows import RowTable
from weft.schedule.sequence import Sequence
from weft.schedule.snapshots import AUTO
from weft.units import CHUNK_TOKENS, SeqId

TOKENS = np.arange(10, dtype=np.int32)


def sequence(pooling: Pooling | None) -> Sequence:
    sampling = SamplingParams(max_tokens=0)
    return Sequence(SeqId(1), prompt=TOKENS, sampling=sampling, seed=0, stop_ids=(), rank=(0, 0, 0), pooling=pooling)


@pytest.mark.parametrize(
    ("pooling", "ends", "reused"),
    [
        (None, (), 10),
        (Pooling(kind="last"), (10,), 10),
        (Pooling(kind="first"), (1,), 0),
        (Pooling(kind="mean"), range(1, 11), 0),
        (Pooling(kind="mean", skip=4), (5, 6, 7, 8, 9, 10), 4),
    ],
)
def test_the_rows_of_a_mean_are_all_behind_what_it_skips(
    pooling: Pooling | None, ends: tuple[int, ...], reused: int
) -> None:
    one = sequence(pooling)
    assert [end for end in range(1, 11) if one.pools(end - 1, end)] == list(ends)
    assert one.reusable(TOKENS).size == reused


@pytest.mark.parametrize(("computed_before", "looked_up"), [(0, 10), (4, 10), (10, 11)])
def test_the_last_token_of_who_waits_is_cached_for_it_only_if_it_was_computed(
    computed_before: int, looked_up: int
) -> None:
    """A lookup leaves the last token out: a preempted sequence asks for one more."""
    asked: list[int] = []

    def match(tokens: np.ndarray, salt: str) -> Any:
        asked.append(tokens.size)
        return SimpleNamespace(anchor=NO_NODE)

    memory: Any = SimpleNamespace(plan=SimpleNamespace(slots_per_frame=0, slot_bytes=0, page_bytes=1, slot_count=0))
    memory.caches, memory.match = True, match
    reuse = Reuse(memory, AUTO, RowTable(1), CHUNK_TOKENS)
    waiting = sequence(None)
    waiting.computed_before = computed_before
    reuse.awaits(waiting)
    assert asked == [looked_up]
