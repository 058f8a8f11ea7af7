"""What leaves a full store first: the checkpoints that save the fewest seconds per byte.

    value = seconds saved by a hit x (1 + hits) / bytes written for it / puts since its last use

The age counts puts and restores, not time: a clock that jumps changes nothing, and a store that nothing is
written to forgets nothing. KV records that no checkpoint needs go before any checkpoint. With a checkpoint go
the KV records that only it needed.

Rejected: LRU (a turn of 100,000 tokens and one of 100 then live equally long); wall-clock ages.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from weft.store.index import NO_ENTRY, StoreIndex
from weft.store.rows import CHECKPOINT, KV

YOUNG_PARTS = 8
SUPERSEDED_USES = 0.1
SECONDS_PER_TOKEN = 1e-6
"""Stands in for the seconds of a checkpoint whose writer gave none."""


def ranked_victims(index: StoreIndex, protected: Collection[int]) -> list[int]:
    """Entries that may go alone, the least valuable first; none that is being read or written."""
    c, length = index.c, index.length
    kind, users = c["kind"][:length], c["users"][:length]
    free = c["durable"][:length].copy()
    if protected:
        free[list(protected)] = False
    bare = np.flatnonzero(free & (kind == KV) & (users == 0))
    checkpoints = np.flatnonzero(free & (kind == CHECKPOINT))
    given = c["seconds"][checkpoints]
    seconds = np.where(given > 0, given, c["position"][checkpoints] * SECONDS_PER_TOKEN)
    age = np.float64(index.tick + 1 + index.live_count / YOUNG_PARTS) - c["last_use"][checkpoints]
    held = np.maximum(c["held"][checkpoints], 1)
    uses = c["uses"][checkpoints].astype(np.float64)
    superseded = c["users"][c["parent"][checkpoints]] > 1
    again = np.where(superseded, SUPERSEDED_USES + np.maximum(0.0, uses - 1.0), 1.0 + uses)
    value = seconds * again / held / age
    return [*bare.tolist(), *checkpoints[np.argsort(value, kind="stable")].tolist()]


def evict(index: StoreIndex, blocks: int, protected: Collection[int]) -> list[tuple[int, int, int, int]]:
    """Removes entries that hold at least ``blocks`` blocks, if there are as many. Returns (number, volume,
    first block, payload bytes) of each."""
    c = index.c
    removed: list[tuple[int, int, int, int]] = []
    freed = 0
    for victim in ranked_victims(index, protected):
        if freed >= blocks:
            break
        entry = victim
        while entry != NO_ENTRY and entry not in protected and c["kind"].item(entry) \
                and c["users"].item(entry) == 0 and c["durable"].item(entry):
            parent = c["parent"].item(entry)
            removed.append(place_of(index, entry))
            freed += -(-c["payload"].item(entry) // 4096)
            index.remove(entry)
            entry = parent if parent != NO_ENTRY and c["checkpoint"].item(parent) == NO_ENTRY else NO_ENTRY
    return removed


def place_of(index: StoreIndex, entry: int) -> tuple[int, int, int, int]:
    """(number, volume, first block, payload bytes)."""
    c = index.c
    return (c["number"].item(entry), c["volume"].item(entry), c["block"].item(entry),
            c["payload"].item(entry))


def subtree(index: StoreIndex, entry: int) -> list[int]:
    """``entry`` and everything that needs it, the deepest first."""
    c, length = index.c, index.length
    below = np.zeros(length, dtype=np.bool_)
    below[entry] = True
    parents = c["parent"][:length]
    alive = c["kind"][:length] != 0
    while True:
        more = alive & (parents != NO_ENTRY) & below[np.maximum(parents, 0)] & ~below
        if not more.any():
            break
        below |= more
    entries = np.flatnonzero(below)
    depth = c["position"][entries].astype(np.int64) * 2 + (c["kind"][entries] == CHECKPOINT)
    return [int(one) for one in entries[np.argsort(-depth, kind="stable")]]
