"""Recovery of a ledger after any crash or damage: the rows that are alive, and why the others are not.

    rows --hash--> --retired--> --numbers once--> --places, tokens--> --overlaps--> --parents--> alive

Each arrow drops rows and counts them by reason. A row is dropped, never repaired. Payloads are not read: a
fetch verifies them. The work is done in arrays, because 100,000 snapshots have to be ready within a second.

    reason         the row
    row_hash       has a wrong hash: torn, or bits have flipped
    duplicate      has the number of an earlier row
    place          is in no volume, past the end of one, or not on a block
    tokens         has tokens past the end of the tokens file, or none, or too many
    overlap        has blocks that a later record was given
    orphan         follows a record that is not alive, or does not begin where that ends

Law: L8. A snapshot lives only if the KV of every token before it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.memory.prefix_store import RECORD_TOKENS_MAX, STORED_PAGE_TOKENS
from weft.store.ledger import KV, REMOTE_VOLUME, RETIRED, ROW, SNAPSHOT, USED, LedgerRows, token_sizes
from weft.store.space import BLOCK_BYTES

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Live rows of a ledger: ``rows`` in the order of record numbers, and for each row: ``lines``, its index in the
    file; ``parents``, the index of its parent in ``rows``, -1 at the root; ``uses``, restores so far."""

    rows: LedgerRows
    lines: Int64s
    parents: Int64s
    uses: Int64s
    last_number: int
    last_volume: int
    """The highest volume that any row has named; -1 without rows."""
    dropped: dict[str, int]


def live_rows(rows: LedgerRows, valid: Bools, *, volume_blocks: Mapping[int, int], tokens_bytes: int) -> LiveRows:
    """Return the live rows. ``volume_blocks``: blocks of each volume that is usable."""
    lines = np.arange(1, len(rows) + 1, dtype=np.int64)
    records = rows
    dropped: dict[str, int] = {}

    def keep(mask: Bools, reason: str) -> None:
        nonlocal records, lines
        if not mask.all():
            dropped[reason] = dropped.get(reason, 0) + int(len(mask) - mask.sum())
            records, lines = records[mask], lines[mask]

    if not valid.all():
        dropped["row_hash"] = int(len(valid) - valid.sum())
    good = rows if valid.all() else rows[valid]
    last_number = int(good["number"].max()) if len(good) else 0
    placed = good[np.isin(good["kind"], (KV, SNAPSHOT)) & (good["volume"] != REMOTE_VOLUME)]
    last_volume = int(placed["volume"].max()) if len(placed) else -1
    gone = np.unique(good["parent"][good["kind"] == RETIRED])
    used = good[good["kind"] == USED]
    alive = np.isin(good["kind"], (KV, SNAPSHOT)) & ~np.isin(good["number"], gone)
    records, lines = good, lines[valid]
    if not alive.all():
        records, lines = records[alive], lines[alive]
    if not (records["number"][:-1] < records["number"][1:]).all():
        first = np.zeros(len(records), dtype=np.bool_)
        first[np.unique(records["number"], return_index=True)[1]] = True
        keep(first, "duplicate")
    if not (records["number"][:-1] < records["number"][1:]).all():
        order = np.argsort(records["number"], kind="stable")
        records, lines = records[order], lines[order]
    keep(_placed(records, volume_blocks), "place")
    keep(_has_tokens(records, tokens_bytes), "tokens")
    keep(_newest_of_overlaps(records), "overlap")
    connected, parents = _connected(records)
    if not connected.all():
        keep(connected, "orphan")
        parents = _parents(records)
    uses = records["uses"].astype(np.int64)
    if len(used) and len(records):
        places = np.searchsorted(records["number"], used["parent"])
        hit = (places < len(records)) & (records["number"][np.minimum(places, len(records) - 1)] == used["parent"])
        np.add.at(uses, places[hit], used["uses"][hit].astype(np.int64))
    return LiveRows(records, lines, parents, uses, last_number, last_volume, dropped)


def _placed(records: LedgerRows, volume_blocks: Mapping[int, int]) -> Bools:
    if not len(records):
        return np.zeros(0, dtype=np.bool_)
    volumes, which = np.unique(records["volume"], return_inverse=True)
    blocks = np.asarray([volume_blocks.get(int(volume), 0) for volume in volumes], dtype=np.uint64)[which]
    first, rest = np.divmod(records["offset"], np.uint64(BLOCK_BYTES))
    count = (records["payload_bytes"] + np.uint64(BLOCK_BYTES - 1)) // np.uint64(BLOCK_BYTES)
    inside = (rest == 0) & (first >= 1) & (first < blocks) & (count <= blocks - np.minimum(first, blocks))
    answer: Bools = inside | (records["payload_bytes"] == 0)
    return answer


def _has_tokens(records: LedgerRows, tokens_bytes: int) -> Bools:
    counts = records["tokens"].astype(np.uint64)
    inside = (records["tokens_at"] <= np.uint64(tokens_bytes)) & (
        token_sizes(records) <= np.uint64(tokens_bytes) - np.minimum(records["tokens_at"], np.uint64(tokens_bytes))
    )
    whole = (counts >= 1) & (counts <= RECORD_TOKENS_MAX) & (records["position"] % STORED_PAGE_TOKENS == 0)
    answer: Bools = np.where(records["kind"] == KV, inside & whole, True)
    return answer


def _newest_of_overlaps(records: LedgerRows) -> Bools:
    """Return which records stay: among records that share a block, the one with the highest number."""
    alive = np.ones(len(records), dtype=np.bool_)
    stored = np.flatnonzero(records["payload_bytes"])
    while True:
        live = stored[alive[stored]]
        begin = records["offset"][live]
        order = np.lexsort((begin, records["volume"][live]))
        live = live[order]
        begin = begin[order]
        end = begin + records["payload_bytes"][live]
        clash = (records["volume"][live][1:] == records["volume"][live][:-1]) & (end[:-1] > begin[1:])
        if not clash.any():
            return alive
        pairs = np.flatnonzero(clash)
        alive[np.minimum(live[pairs], live[pairs + 1])] = False


def _parents(records: LedgerRows) -> Int64s:
    """Return the index of each record's parent; -1 at the root, -2 if the parent is not alive or does not fit."""
    if not len(records):
        return np.zeros(0, dtype=np.int64)
    numbers = np.ascontiguousarray(records["number"])
    places = np.searchsorted(numbers, records["parent"])
    safe = np.minimum(places, len(records) - 1)
    end = records["position"].astype(np.int64) + records["tokens"]
    spaces = _halves(records)
    fits = (
        (places < len(records))
        & (numbers[safe] == records["parent"])
        & (records["kind"][safe] == KV)
        & (safe < np.arange(len(records)))
        & (end[safe] == records["position"])
        & (spaces[safe] == spaces).all(axis=1)
    )
    root = (records["parent"] == 0) & (records["kind"] == KV) & (records["position"] == 0)
    answer: Int64s = np.where(root, -1, np.where(fits, safe.astype(np.int64), -2))
    return answer


def _halves(records: LedgerRows) -> npt.NDArray[np.uint64]:
    """Return [records, 4]: namespace and salt as numbers, which compare faster than bytes."""
    begin = ROW.fields["namespace"][1] if ROW.fields is not None else 0
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), -1)
    return words[:, begin // 8 : begin // 8 + 4]


def _connected(records: LedgerRows) -> tuple[Bools, Int64s]:
    parents = _parents(records)
    alive: Bools = parents != -2
    while True:
        nearer: Bools = alive & ((parents < 0) | alive[np.maximum(parents, 0)]) if len(parents) else alive
        if (nearer == alive).all():
            return alive, parents
        alive = nearer
