"""Pruning of a store, which gives disk space back: ``weft store prune`` and ``rm``.

    live rows --drop models, evict by value--> survivors --move out of the emptiest volumes--> fewer volumes
              --new generation with the new places--> old volumes removed

Only the holder of the lock prunes. A payload is copied to blocks that no row names, synced, and then the new generation
names it there. A kill before the rename leaves the old store, one after it the new store; both are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weft.errors import BusyError, ConfigError
from weft.store.disk import OsDisk
from weft.store.eviction import evict
from weft.store.index import StoreIndex
from weft.store.ledger import create_ledger, remove_other_generations
from weft.store.opening import PARAM, STORE_FILE, OpenDirectory, open_directory
from weft.store.recovery import LiveRows
from weft.store.space import BLOCK_BYTES, Extents, blocks_for
from weft.store.upkeep import compacted_rows, tokens_of_rows

PRUNE_ROUNDS = 16
"""Number of rankings of a prune; each evicts an equal part of the excess."""


@dataclass(frozen=True, slots=True)
class PruneResult:
    records_before: int
    records: int
    allocated_bytes_before: int
    allocated_bytes: int
    moved_bytes: int


def prune(
    path: Path,
    *,
    size_bytes: int | None,
    without: Collection[bytes] = (),
    numbers: Collection[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
    disk: OsDisk | None = None,
) -> PruneResult:
    """Drop the namespaces ``without``, and the records ``numbers`` with all records that need them. Then evict down to
    ``size_bytes`` of payload, and give free space back. Raises ConfigError, and BusyError while a server writes to the
    directory."""
    disk = disk or OsDisk()
    if not disk.exists(path / STORE_FILE):
        raise ConfigError(f"{path}: is not a store: it has no {STORE_FILE}", param=PARAM)
    opened = open_directory(path, disk)
    try:
        if not opened.writable:
            raise BusyError(f"{'; '.join(opened.notes)}; stop that server first")
        return _pruned(opened, size_bytes, without, numbers, progress)
    except OSError as error:
        raise ConfigError(f"--store {path}: {error.strerror or error}", param=PARAM) from None
    finally:
        opened.close()


def _pruned(
    opened: OpenDirectory,
    size_bytes: int | None,
    without: Collection[bytes],
    numbers: Collection[int],
    progress: Callable[[int, int], None],
) -> PruneResult:
    live, ledger = opened.live, opened.ledger
    assert live is not None
    assert ledger is not None
    before, allocated = len(live.rows), sum(opened.volume_blocks.values()) * BLOCK_BYTES
    live = _without(live, without, numbers)
    if size_bytes is not None:
        live = _down_to(live, size_bytes)
    rows, volumes, moved = _packed(opened, live, progress)
    live = replace(live, rows=rows)
    create_ledger(opened.path, opened.disk, ledger.generation + 1, compacted_rows(live), tokens_of_rows(ledger, live))
    remove_other_generations(opened.path, opened.disk, ledger.generation + 1)
    for volume in opened.volume_blocks.keys() - volumes:
        opened.volumes.remove(volume)
    left = sum(opened.volume_blocks[volume] for volume in volumes) * BLOCK_BYTES
    return PruneResult(before, len(live.rows), allocated, left, moved)


def _without(live: LiveRows, namespaces: Collection[bytes], numbers: Collection[int]) -> LiveRows:
    """Return the rows of other namespaces, without the records ``numbers`` and all records that need them."""
    rows = live.rows
    keep = np.ones(len(rows), dtype=np.bool_)
    for namespace in namespaces:
        keep &= rows["namespace"] != np.void(namespace)
    keep &= ~np.isin(rows["number"], list(numbers))
    while len(rows):
        nearer = keep & ((live.parents < 0) | keep[np.maximum(live.parents, 0)])
        if (nearer == keep).all():
            break
        keep = nearer
    return _selected(live, keep)


def _down_to(live: LiveRows, size_bytes: int) -> LiveRows:
    index = StoreIndex()
    index.load(live, bytes(16))
    blocks = sum(blocks_for(size) for size in live.rows["payload_bytes"].tolist())
    excess = blocks - size_bytes // BLOCK_BYTES
    # The value of a snapshot depends on the snapshots that stay, so the ranking is computed again several times.
    least = max(1, excess // PRUNE_ROUNDS)
    while excess > 0 and (removed := evict(index, min(excess, least), ())):
        excess -= sum(blocks_for(payload_bytes) for *_, payload_bytes in removed)
    return _selected(live, index.c["kind"][: index.length] != 0)


def _selected(live: LiveRows, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> LiveRows:
    place = np.cumsum(keep) - 1
    parents = live.parents[keep]
    return replace(
        live,
        rows=live.rows[keep],
        lines=live.lines[keep],
        uses=live.uses[keep],
        parents=np.where(parents >= 0, place[np.maximum(parents, 0)], parents),
    )


def _packed(
    opened: OpenDirectory, live: LiveRows, progress: Callable[[int, int], None]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.void]], set[int], int]:
    """Return (rows with their new places, volumes that are still needed, bytes moved)."""
    rows = live.rows.copy()
    stored = np.flatnonzero(rows["payload_bytes"])
    used = dict.fromkeys(opened.volume_blocks, 0)
    for row in stored.tolist():
        used[int(rows["volume"][row])] += blocks_for(int(rows["payload_bytes"][row]))
    chosen = _fullest(opened.volume_blocks, used)
    extents = Extents()
    for volume in chosen:
        extents.add_volume(volume, opened.volume_blocks[volume])
        mine = stored[rows["volume"][stored] == volume]
        extents.take_known(
            volume,
            sorted(
                (int(rows["offset"][row]) // BLOCK_BYTES, blocks_for(int(rows["payload_bytes"][row]))) for row in mine
            ),
        )
    to_move = [int(row) for row in stored if int(rows["volume"][row]) not in chosen]
    to_move.sort(key=lambda row: -int(rows["payload_bytes"][row]))
    moved, touched = 0, set()
    for done, row in enumerate(to_move):
        progress(done, len(to_move))
        payload = memoryview(bytearray(int(rows["payload_bytes"][row])))
        place = extents.take(blocks_for(len(payload)))
        volume = int(rows["volume"][row])
        if place is None:
            chosen.add(volume)
            continue
        opened.volumes.read_payload(rows[row], payload)
        opened.volumes.write(*place, payload)
        rows["volume"][row], rows["offset"][row] = place[0], place[1] * BLOCK_BYTES
        touched.add(place[0])
        moved += len(payload)
    for volume in touched:
        opened.volumes.sync(volume)
    progress(len(to_move), len(to_move))
    return rows, chosen, moved


def _fullest(blocks: dict[int, int], used: dict[int, int]) -> set[int]:
    """Return the fewest volumes, the fullest first, that have room for all used blocks."""
    needed, room, chosen = sum(used.values()), 0, set()
    for volume in sorted(blocks, key=lambda number: (-used[number] / blocks[number], number)):
        if room >= needed:
            break
        room += blocks[volume] - 1
        chosen.add(volume)
    return chosen
