"""Order of evictions from a full store: the snapshots that save the fewest seconds per byte go first.

    value = seconds saved over the snapshot above x uses / bytes freed / records written since the last use

    root ----------o above ---------o snapshot      without it a request resumes at ``above``
                   |<-- seconds --->|
                   |<---- KV ------>| + state         bytes freed

If a longer prefix goes on from a snapshot, that prefix needs the KV as well, so evicting the snapshot frees only its
state. The last state of a prompt and the end of its answer are some 500 tokens apart, and in a full store one of the
two suffices. So the first use of such a snapshot counts only CONTINUED_USES: only a prompt that parts here needs it.

The age counts records and restores, not time: a clock that jumps changes nothing, and a store without writes forgets
nothing. KV records that no snapshot needs are evicted before any snapshot. The KV records that only one snapshot
needed are evicted with that snapshot.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from weft.memory.prefix_store import STORED_PAGE_TOKENS
from weft.store.index import NO_ENTRY, StoreIndex
from weft.store.ledger import KV, SNAPSHOT
from weft.store.recovery import Int64s

SECONDS_PER_TOKEN = 1e-6
"""Seconds per token, assumed for a snapshot whose writer gave no seconds."""

EVICTED_SHARE = 256
"""Inverse of the least share of a store that one ranking evicts. Ranking 60,000 records takes 4 ms between two
steps."""

CONTINUED_USES = 0.25
"""Uses that replace ``1 + hits`` for a snapshot with a longer prefix; restores beyond the first are added."""


def ranked_victims(index: StoreIndex, protected: Collection[int]) -> list[int]:
    """Return entries that may be evicted, the least valuable first, without those that are being read or written."""
    c, length = index.c, index.length
    kind, users = c["kind"][:length], c["users"][:length]
    free = c["durable"][:length].copy()
    if protected:
        free[list(protected)] = False
    bare = np.flatnonzero(free & (kind == KV) & (users == 0))
    snapshots = np.flatnonzero(free & (kind == SNAPSHOT))
    computed, position = c["seconds"][snapshots], c["position"][snapshots].astype(np.float64)
    seconds = np.where(computed > 0, computed, position * SECONDS_PER_TOKEN)
    age = np.float64(index.tick + 1) - c["last_use"][snapshots]
    uses = c["uses"][snapshots].astype(np.float64)
    continued = _continued(index, snapshots)
    again = np.where(continued, CONTINUED_USES + np.maximum(0.0, uses - 1.0), 1.0 + uses)
    share = 1.0 - positions_above(index, snapshots) / np.maximum(1.0, position)
    state_bytes = np.maximum(1.0, c["payload"][snapshots])
    size_bytes = state_bytes + np.where(continued, 0.0, _kv_bytes(index, snapshots) * share)
    value = seconds * share * again / size_bytes / age
    return [*bare.tolist(), *snapshots[np.argsort(value, kind="stable")].tolist()]


def positions_above(index: StoreIndex, snapshots: Int64s) -> npt.NDArray[np.float64]:
    """Return the position of the stored snapshot above each of ``snapshots``, 0 without one.

    All parents are followed at once, in steps that double. A snapshot inside a stored page ends in a record of its own,
    which is a sibling of the longer prefix; for longer prefixes it counts as a snapshot at its parent."""
    c, length = index.c, index.length
    root = length  # after the last entry: the end of every path
    bare = (c["parent"][:length] < 0) | (c["kind"][:length] == 0)
    parents = np.append(np.where(bare, root, c["parent"][:length]), root)
    ends = c["kind"][:length] == KV
    ends &= c["snapshot"][:length] != NO_ENTRY
    stops = np.append(ends, True)
    inside = np.flatnonzero(ends & (c["tokens"][:length] % STORED_PAGE_TOKENS != 0))
    stops[parents[inside]] = True
    nearest = np.where(stops, np.arange(length + 1), parents)
    while True:
        further = nearest[nearest]
        if np.array_equal(further, nearest):
            break
        nearest = further
    last = c["parent"][snapshots]
    before = parents[last]
    own = (c["tokens"][last] % STORED_PAGE_TOKENS != 0) & ~np.append(ends, False)[before]
    nearest_ends = nearest[np.where(own, parents[before], before)]
    positions = np.append(c["position"][:length].astype(np.float64) + c["tokens"][:length], 0.0)
    above: npt.NDArray[np.float64] = positions[nearest_ends]
    return above


def _continued(index: StoreIndex, snapshots: Int64s) -> npt.NDArray[np.bool_]:
    """Return, for each of ``snapshots``, whether a longer prefix goes on from its end."""
    c = index.c
    last = c["parent"][snapshots]
    # No record goes on from one that ends inside a stored page: its parent has the next records as well.
    before = np.where(c["tokens"][last] % STORED_PAGE_TOKENS, c["parent"][last], last)
    goes_on: npt.NDArray[np.bool_] = c["users"][last] > 1
    goes_on |= (before != NO_ENTRY) & (c["users"][before] > 1)
    return goes_on


def _kv_bytes(index: StoreIndex, snapshots: Int64s) -> npt.NDArray[np.float64]:
    """Return the bytes of the KV of each snapshot from the root on, in the proportion of its last record."""
    c = index.c
    last = c["parent"][snapshots]
    pages = (c["tokens"][last].astype(np.int64) + STORED_PAGE_TOKENS - 1) // STORED_PAGE_TOKENS
    tokens = pages * STORED_PAGE_TOKENS
    per_token = c["payload"][last] / np.maximum(tokens, 1)
    kv_bytes: npt.NDArray[np.float64] = per_token * c["position"][snapshots]
    return kv_bytes


def evict(index: StoreIndex, blocks: int, protected: Collection[int]) -> list[tuple[int, int, int, int]]:
    """Remove entries that hold at least ``blocks`` blocks in total, or all that may go. Returns (number, volume, first
    block, payload bytes) of each."""
    c = index.c
    removed: list[tuple[int, int, int, int]] = []
    freed = 0
    for victim in ranked_victims(index, protected):
        if freed >= blocks:
            break
        entry = victim
        while (
            entry != NO_ENTRY
            and entry not in protected
            and c["kind"].item(entry)
            and c["users"].item(entry) == 0
            and c["durable"].item(entry)
        ):
            parent = c["parent"].item(entry)
            removed.append(place_of(index, entry))
            freed += -(-c["payload"].item(entry) // 4096)
            index.remove(entry)
            entry = parent if parent != NO_ENTRY and c["snapshot"].item(parent) == NO_ENTRY else NO_ENTRY
    return removed


def place_of(index: StoreIndex, entry: int) -> tuple[int, int, int, int]:
    """Return (number, volume, first block, payload bytes) of ``entry``."""
    c = index.c
    return (c["number"].item(entry), c["volume"].item(entry), c["block"].item(entry), c["payload"].item(entry))


def subtree(index: StoreIndex, entry: int) -> list[int]:
    """Return ``entry`` and everything that needs it, the deepest first."""
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
    depth = c["position"][entries].astype(np.int64) * 2 + (c["kind"][entries] == SNAPSHOT)
    return [int(number) for number in entries[np.argsort(-depth, kind="stable")]]
