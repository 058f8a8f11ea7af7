"""What the comparison of cache policies does besides replaying: parts of a run come together, and what it is
worth to know classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cache_policy import merged
from benchmarks.return_bound import Answers, curve


def rows(requests: int, *cells: tuple[str, int, float]) -> dict[str, Any]:
    return {
        "requests": requests,
        "prompt_tokens": 10 * requests,
        "oracle": [],
        "results": [{"arm": arm, "memory_bytes": size, "hit_rate": rate} for arm, size, rate in cells],
    }


def test_a_run_in_parts_keeps_the_rows_of_the_other_parts_and_replaces_its_own() -> None:
    before = rows(5, ("value", 20, 0.1), ("lru", 20, 0.05))
    both = merged(before, rows(5, ("lru", 10, 0.01), ("lru", 20, 0.06)))
    assert [(row["arm"], row["memory_bytes"], row["hit_rate"]) for row in both["results"]] == [
        ("value", 20, 0.1),
        ("lru", 10, 0.01),
        ("lru", 20, 0.06),
    ]


def test_rows_of_other_requests_are_not_kept_beside_new_ones() -> None:
    now = rows(6, ("lru", 20, 0.06))
    assert merged(rows(5, ("value", 20, 0.1)), now) == now
    assert merged(None, now) == now


def test_telling_classes_apart_saves_more_and_memory_without_end_saves_all_that_comes_back() -> None:
    answers = Answers("sample", 400)
    most = []
    for classes in answers.classes().values():
        held, saved = curve(answers, classes)
        assert (np.diff(held) >= 0).all()
        assert (np.diff(saved) >= 0).all()
        most.append(np.interp(1e9, np.append(0.0, held), np.append(0.0, saved)))
    again = np.isfinite(answers.again_s) & (answers.again_s > 0)
    assert saved[-1] <= (answers.prompts + answers.answers)[again].sum()
    assert most[0] < most[1] < most[2]
