"""The filter before the table of snapshots: it hides no entry, and passes few absent digests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.prefix_digests import prefix_digests, token_array
from weft.router import snapshot_table
from weft.router.snapshot_table import CELLS_PER_ENTRY, DigestFilter


def test_no_entry_is_hidden_and_few_absent_digests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_table, "CELLS_MIN", 1 << 10)
    rng = random.Random(1)
    entries: dict[int, None] = {}
    tested = DigestFilter()
    for step in range(8000):
        if entries and rng.random() < 0.3:
            gone = next(iter(entries))
            del entries[gone]
            tested.remove(gone)
        else:
            digest = rng.getrandbits(64)
            entries[digest] = None
            tested.add(digest, entries)
        if step % 1000 == 999:
            present = np.fromiter(entries, dtype=np.uint64)
            assert tested.candidates(present) == list(range(len(entries)))
    absent = np.fromiter((rng.getrandbits(64) for _ in range(20_000)), dtype=np.uint64)
    assert 0 < len(tested.candidates(absent)) < 1.2 * absent.size / CELLS_PER_ENTRY


def test_a_full_cell_stays_full() -> None:
    tested = DigestFilter()
    digests = [at << 32 for at in range(300)]
    for digest in digests:
        tested.add(digest, digests)
    for digest in digests:
        tested.remove(digest)
    assert tested.candidates(np.asarray([0], dtype=np.uint64)) == [0]


def test_a_list_and_an_array_have_the_same_digests() -> None:
    tokens = [0, 1, 2**31 - 1, *range(500)]
    assert token_array(tokens).tolist() == tokens
    array = np.asarray(tokens, dtype=np.int64)
    assert (prefix_digests(array, "s") == prefix_digests(tokens, "s")).all()
    assert not prefix_digests([], "").size
