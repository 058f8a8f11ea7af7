"""The candidates for eviction: in order of value whatever is put in, taken out or valued anew."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.memory.prefix.value.candidates import SWEEP_EVERY, Candidates, Pool


def test_candidates_come_the_lowest_value_first_after_any_changes() -> None:
    random, pool, values = Random(5), Pool(), dict[int, float]()
    for _ in range(600):
        row = random.randrange(40)
        match random.randrange(8):
            case 0:
                pool.drop(row)
                values.pop(row, None)
            case 1:
                values = {one: random.choice([0.25, 0.5, random.random()]) for one in values}
                pool.fill(np.array(list(values), np.int64), np.array(list(values.values())), len(values) + 1)
            case _:
                values[row] = random.choice([0.25, 0.5, random.random()])
                pool.put(row, values[row])
        named = [row for _, row in pool.ranked()]
        assert sorted(named) == sorted(values)
        assert len(pool) == len(values)
        assert [values[one] for one in named] == sorted(values.values())


def test_of_too_many_the_lowest_are_candidates() -> None:
    pool = Pool()
    pool.fill(np.arange(5), np.array([0.5, 0.1, 0.4, 0.2, 0.3]), 3)
    assert list(pool.ranked()) == [(0.1, 1), (0.2, 3), (0.3, 4)]
    assert pool.rows.tolist() == [1, 3, 4]


def test_who_reads_sees_the_candidates_as_they_were() -> None:
    pool = Pool()
    for row in range(4):
        pool.put(row, float(row))
    reader = pool.ranked()
    assert next(reader) == (0.0, 0)
    pool.drop(1)
    assert [row for _, row in reader] == [1, 2, 3]
    assert [row for _, row in pool.ranked()] == [0, 2, 3]


def test_sweeps_reach_every_record_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.memory.prefix.value.candidates.SWEEP_ROWS", 4)
    live = np.ones(10, bool)
    records: Any = SimpleNamespace(count=10, live=live, rows=lambda first, end: np.arange(first, end))
    swept: list[list[int]] = []
    prospects: Any = SimpleNamespace(
        count_rows=lambda rows: swept.append(rows.tolist()),
        learn=lambda: None,
        weigh_rows=lambda rows: None,
        values=lambda rows: rows / 10.0,
    )
    candidates = Candidates(records, prospects)
    for _ in range(4):
        for _ in range(SWEEP_EVERY):
            candidates.opened()
        candidates.update()
    assert swept == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
