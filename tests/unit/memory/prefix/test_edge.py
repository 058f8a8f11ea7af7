"""Edges of the prefix tree: how much of two token strings is equal."""

from __future__ import annotations

import numpy as np
import pytest

from weft.memory.prefix.edge import common_pages
from weft.units import PAGE_TOKENS


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("at", [0, 1, PAGE_TOKENS - 1, PAGE_TOKENS, 2 * PAGE_TOKENS + 5, 3 * PAGE_TOKENS - 1])
def test_common_pages_end_before_the_first_token_that_differs_whichever_is_larger(at: int, change: int) -> None:
    left = np.full(3 * PAGE_TOKENS, 7, np.int32)
    right = left.copy()
    right[at] += change
    assert common_pages(left.tobytes(), right.tobytes()) == at // PAGE_TOKENS
    assert common_pages(right.tobytes(), left.tobytes()) == at // PAGE_TOKENS


def test_equal_strings_share_all_whole_pages_of_the_shorter_one() -> None:
    tokens = np.arange(3 * PAGE_TOKENS + 5, dtype=np.int32)
    for length in (0, 1, PAGE_TOKENS - 1, PAGE_TOKENS, 2 * PAGE_TOKENS + 3):
        assert common_pages(tokens.tobytes(), tokens[:length].tobytes()) == length // PAGE_TOKENS
