"""Rows of a transfer buffer that a restore takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.memory.prefix_store import EXACT_FORM, INT8_STATE, StoredPrefix, StoredSpan
from weft.schedule.restores import _rows_of


@pytest.mark.parametrize(("form", "rows"), [(EXACT_FORM, 3), (INT8_STATE, 4)])
def test_a_compressed_state_follows_the_pages_in_rows_of_its_own(form: int, rows: int) -> None:
    """One in its exact form has its own place."""
    prefix = StoredPrefix(1, 1, 48, (StoredSpan(0, 0, 0, 48, 3 * 640),), 100, form, exact=False, tokens=b"")
    wish: Any = SimpleNamespace(prefix=prefix, start=0)
    assert _rows_of(wish, 640).total == rows
