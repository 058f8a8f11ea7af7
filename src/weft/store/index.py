"""``StoreIndex``: the records of a store in memory, about 75 bytes each, and lookups by tokens.

    root chain --head of 16 tokens--> KV record --chain matches?--> KV record --> ... --> snapshots there
    (snapshot entry, KV entries) --prefix_of--> StoredPrefix --reads_of, start, buffers--> RecordRead ...

An entry is one KV record or one snapshot, of any namespace. Entries are columns of arrays: 100,000
snapshots load in array operations. A dictionary from ``head`` to entry finds the children of a record;
children with one head form a list. Snapshots hang on the KV record that ends at their position.

The index has hashes, not tokens. ``deepest`` therefore finds candidates, and a fetch compares the tokens (law
L10). An entry that a put has added matches only once it is durable; ``covered`` sees it before, so that two
puts in a row do not write the same KV twice.

Laws: L8 (a snapshot's KV records are its ancestors, and an entry with users is never removed before them), L11 (a walk
visits at most ``VISITS_MAX`` entries).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.memory.prefix_store import EXACT_FORM, STORED_PAGE_TOKENS, PutOffer, StagingBuffers, StoredPrefix, StoredSpan
from weft.store.ledger import INEXACT, KV, SNAPSHOT, chain_of, head_of
from weft.store.reading import RecordRead
from weft.store.recovery import Int64s, LiveRows
from weft.store.sealing import SEAL_BYTES, Sealer, sealed_size
from weft.units import ceil_div

NO_ENTRY = -1
VISITS_MAX = 4096
_COLUMNS: dict[str, tuple[Any, int]] = {
    "number": (np.uint64, 0), "chain": (np.uint64, 0), "parent": (np.int32, NO_ENTRY),
    "position": (np.uint32, 0), "tokens": (np.uint16, 0), "kind": (np.uint8, 0), "flags": (np.uint8, 0),
    "durable": (np.bool_, False), "space": (np.uint32, 0), "head": (np.uint64, 0), "form": (np.uint32, 0),
    "volume": (np.uint32, 0), "block": (np.uint32, 0), "payload": (np.uint32, 0), "line": (np.uint32, 0),
    "seconds": (np.float32, 0), "uses": (np.uint32, 0), "last_use": (np.uint32, 0),
    "users": (np.int32, 0), "sibling": (np.int32, NO_ENTRY), "snapshot": (np.int32, NO_ENTRY),
}  # fmt: skip
"""Columns: name -> (dtype, value of an entry that is not filled). ``space``: number of the (namespace, salt) pair.
``sibling``: the next entry of a list of children or of snapshots. ``snapshot``: the first snapshot at the end of a KV
record."""


@dataclass(frozen=True, slots=True)
class KvChain:
    """A chain of KV entries from the root on, and the position at its end. ``chain``: the name of that prefix."""

    entries: tuple[int, ...]
    end: int
    chain: int

    def up_to(self, index: StoreIndex, position: int, root: int) -> KvChain | None:
        """Return the part of the chain that ends at ``position``; None if no record ends there."""
        c, entries, end = index.c, list(self.entries), self.end
        while entries and end > position:
            end = c["position"].item(entries.pop())
        if end != position:
            return None
        return KvChain(tuple(entries), end, c["chain"].item(entries[-1]) if entries else root)


def knows(forms: frozenset[int] | None, form: int) -> bool:
    """Return whether ``forms``, the forms that an engine reads (None: all), include ``form``."""
    return forms is None or form in forms


class StoreIndex:
    """The records of a store. ``c``: the columns; an entry is an index into them."""

    def __init__(self, forms: frozenset[int] | None = None, sealer: Sealer | None = None) -> None:
        self.forms = forms
        """Forms of records that match; None for all."""
        self.sealer = sealer
        self.c: dict[str, np.ndarray[Any, Any]] = {
            name: np.full(64, fill, dtype=dtype) for name, (dtype, fill) in _COLUMNS.items()
        }
        self.length = 0
        self.heads: dict[int, int] = {}
        self.spaces: dict[tuple[bytes, bytes], int] = {}
        self._free: list[int] = []
        self._short: dict[int, int] = {}
        self.tick = 0
        self._changes = 0
        """Entries added and removed so far."""
        self.durable_changes = 0
        """Number of durable entries added and removed so far. While it is the same, so are the results of
        ``deepest``.
        """
        self._covered: tuple[tuple[int, bytes, bool, int], KvChain] | None = None
        """Last question to ``covered``, with the changes before it, and its answer."""

    def load(self, live: LiveRows, namespace: bytes) -> None:
        """Fill an empty index. Only rows of ``namespace`` can match; other rows are loaded because they hold space."""
        rows, count = live.rows, len(live.rows)
        assert self.length == 0
        self._reserve(count)
        self.length = count
        c, part = self.c, slice(0, count)
        for name in ("number", "chain", "head", "position", "tokens", "kind", "flags", "form", "volume", "seconds"):
            c[name][part] = rows[name]
        c["durable"][part] = True
        c["payload"][part] = rows["payload_bytes"]
        c["block"][part] = rows["offset"] // np.uint64(4096)
        c["line"][part], c["uses"][part] = live.lines, live.uses
        c["last_use"][part] = np.arange(count, dtype=np.uint32)
        self.tick = count
        parents = live.parents
        c["parent"][part] = parents
        np.add.at(c["users"], parents[parents >= 0], 1)
        self._load_spaces(live)
        self._unveil(np.flatnonzero(rows["namespace"] == np.void(namespace)))
        own = np.flatnonzero((rows["kind"] == KV) & (rows["namespace"] == np.void(namespace)))
        entries, heads = own.tolist(), c["head"][own].tolist()
        self.heads = dict(zip(heads, entries, strict=True))
        if len(self.heads) < len(heads):  # some records are siblings: their lists are built one by one
            self.heads.clear()
            for entry, head in zip(entries, heads, strict=True):
                c["sibling"][entry] = self.heads.get(head, NO_ENTRY)
                self.heads[head] = entry
        short = rows["tokens"][own]
        counts = np.bincount(short[short < STORED_PAGE_TOKENS], minlength=1)
        self._short = {length: int(count) for length, count in enumerate(counts) if count}
        self._load_snapshots(np.flatnonzero(rows["kind"] == SNAPSHOT), parents)

    def _unveil(self, own: Int64s) -> None:
        """Return to plain form the digests of the entries ``own``: rows have them encrypted, as one block each."""
        if self.sealer is None or not len(own):
            return
        blocks = np.stack([self.c["chain"][own], self.c["head"][own]], axis=1).astype("<u8")
        plain = np.frombuffer(self.sealer.unveiled(blocks.tobytes()), "<u8").reshape(-1, 2)
        self.c["chain"][own], self.c["head"][own] = plain[:, 0], plain[:, 1]

    def stored_size(self, nbytes: int) -> int:
        """Return the bytes on the disk of a payload of ``nbytes``."""
        return nbytes if self.sealer is None else sealed_size(nbytes)

    def payload_size(self, entry: int) -> int:
        """Return the bytes of an entry's payload in memory."""
        stored: int = self.c["payload"].item(entry)
        return stored if self.sealer is None or not stored else stored - SEAL_BYTES

    def add(self, *, parent: int, space: int, kind: int, **columns: Any) -> int:
        """Add an entry of this namespace, and return it."""
        self._changes += 1
        entry = self._free.pop() if self._free else self.length
        if entry == self.length:
            self._reserve(self.length + 1)
            self.length += 1
        c = self.c
        for name, (_, fill) in _COLUMNS.items():
            c[name][entry] = columns.get(name, fill)
        self.tick += 1
        c["parent"][entry], c["space"][entry] = parent, space
        c["kind"][entry], c["last_use"][entry] = kind, self.tick
        if parent != NO_ENTRY:
            c["users"][parent] += 1
        if kind == KV:
            c["sibling"][entry] = self.heads.get(columns["head"], NO_ENTRY)
            self.heads[columns["head"]] = entry
            self._count_short(columns["tokens"], 1)
        else:
            c["sibling"][entry] = c["snapshot"][parent]
            c["snapshot"][parent] = entry
        return entry

    def remove(self, entry: int) -> None:
        """Remove an entry without users."""
        self._changes += 1
        c = self.c
        self.durable_changes += bool(c["durable"][entry])
        head = c["head"].item(entry)
        parent = c["parent"].item(entry)
        assert c["users"][entry] == 0
        assert c["kind"][entry] != 0
        if parent != NO_ENTRY:
            c["users"][parent] -= 1
        if c["kind"].item(entry) == SNAPSHOT:
            c["snapshot"][parent] = self._without(c["snapshot"].item(parent), entry)
        elif head in self.heads:
            self._unlink(entry, head)
        c["kind"][entry] = 0
        self._free.append(entry)

    def make_durable(self, entries: Sequence[int]) -> None:
        """Mark ``entries``, whose records are on the disk, as durable: they may match."""
        self.c["durable"][list(entries)] = True
        self.durable_changes += 1

    def touch(self, entry: int) -> None:
        """Count a restore of a snapshot."""
        self.tick += 1
        self.c["uses"][entry] += 1
        self.c["last_use"][entry] = self.tick

    @property
    def live_count(self) -> int:
        return self.length - len(self._free)

    def deepest(self, root: int, tokens: bytes, *, above: int, exact: bool) -> tuple[int, KvChain] | None:
        """Return the deepest durable snapshot of more than ``above`` tokens under ``tokens``, and its KV."""
        best: tuple[int, KvChain] | None = None
        for path in self._paths(root, tokens, exact=exact, durable=True):
            if path.end > max(above, best[1].end if best else 0):
                snapshot = self.snapshot_at(path, exact=exact, durable=True)
                if snapshot != NO_ENTRY:
                    best = snapshot, path
        return best

    def covered(self, root: int, tokens: bytes, *, exact: bool) -> KvChain:
        """Return the longest chain of KV records under ``tokens`` from which a record can go on: a chain that ends at a
        multiple of 16 or with the tokens. Records that are not durable yet count. The last result is remembered,
        because a put asks the same as its offer."""
        question = root, tokens, exact, self._changes
        if self._covered is not None and self._covered[0] == question:
            return self._covered[1]
        best = KvChain((), 0, root)
        for path in self._paths(root, tokens, exact=exact, durable=False):
            if path.end > best.end and (path.end % STORED_PAGE_TOKENS == 0 or path.end * 4 == len(tokens)):
                best = path
        self._covered = question, best
        return best

    def offer(self, root: int, tokens: bytes, *, exact: bool) -> PutOffer | None:
        """Return the records that a put of a snapshot at the end of ``tokens`` needs; None if the snapshot is stored or
        being written."""
        path, position = self.covered(root, tokens, exact=exact), len(tokens) // 4
        if path.end == position and self.snapshot_at(path, exact=exact, durable=False) != NO_ENTRY:
            return None
        return PutOffer(path.end, position, snapshot_above(self, path, exact=exact))

    def base(self, root: int, tokens: bytes, start: int, *, exact: bool) -> KvChain | None:
        """Return the stored KV that ends at ``start``; None if it was evicted after the offer."""
        return self.covered(root, tokens, exact=exact).up_to(self, start, root)

    def snapshot_at(self, path: KvChain, *, exact: bool, durable: bool) -> int:
        """Return a snapshot at the end of ``path``, an exact one if there is a choice."""
        answer = NO_ENTRY
        if not path.entries:
            return answer
        for entry in self._list(self.c["snapshot"].item(path.entries[-1])):
            rounded = self.c["flags"].item(entry) & INEXACT
            if (
                (rounded and exact)
                or (durable and not self.c["durable"][entry])
                or not knows(self.forms, self.c["form"].item(entry))
            ):
                continue
            if not rounded:
                return entry
            answer = entry
        return answer

    def _paths(self, root: int, tokens: bytes, *, exact: bool, durable: bool) -> Iterator[KvChain]:
        view = memoryview(tokens)
        c, to_visit, visits = self.c, [KvChain((), 0, root)], 0
        while to_visit and visits < VISITS_MAX:
            visited = to_visit.pop()
            rest = view[4 * visited.end :]
            if visited.end % STORED_PAGE_TOKENS or not rest:
                continue
            lengths = [n for n in self._short if 4 * n <= len(rest)]
            lengths += [STORED_PAGE_TOKENS] if len(rest) >= 4 * STORED_PAGE_TOKENS else []
            for length in lengths:
                for entry in self._list(self.heads.get(head_of(visited.chain, rest[: 4 * length]), NO_ENTRY)):
                    visits += 1
                    count = c["tokens"].item(entry)
                    if (
                        (exact and c["flags"].item(entry) & INEXACT)
                        or (durable and not c["durable"][entry])
                        or 4 * count > len(rest)
                        or c["position"].item(entry) != visited.end
                        or not knows(self.forms, c["form"].item(entry))
                    ):
                        continue
                    chain = chain_of(visited.chain, rest[: 4 * count])
                    if chain == c["chain"].item(entry) and c["parent"].item(entry) == (
                        visited.entries[-1] if visited.entries else NO_ENTRY
                    ):
                        path = KvChain((*visited.entries, entry), visited.end + count, chain)
                        to_visit.append(path)
                        yield path

    def _list(self, first: int) -> Iterator[int]:
        while first != NO_ENTRY:
            yield first
            first = self.c["sibling"].item(first)

    def _without(self, first: int, entry: int) -> int:
        """Return the list that begins at ``first``, without ``entry``."""
        sibling = self.c["sibling"]
        if first == entry:
            return int(sibling[entry])
        for other in self._list(first):
            if sibling.item(other) == entry:
                sibling[other] = sibling.item(entry)
                break
        return first

    def _unlink(self, entry: int, head: int) -> None:
        first = self._without(self.heads[head], entry)
        if first == NO_ENTRY:
            del self.heads[head]
        else:
            self.heads[head] = first
        self._count_short(self.c["tokens"].item(entry), -1)

    def _count_short(self, tokens: int, change: int) -> None:
        """Count records shorter than a stored page by length: a lookup tries each length that exists."""
        if tokens < STORED_PAGE_TOKENS:
            self._short[tokens] = self._short.get(tokens, 0) + change
            if self._short[tokens] == 0:
                del self._short[tokens]

    def _reserve(self, length: int) -> None:
        capacity = len(self.c["number"])
        if length <= capacity:
            return
        more = max(length, capacity + capacity // 4) - capacity
        for name, (dtype, fill) in _COLUMNS.items():
            self.c[name] = np.concatenate([self.c[name], np.full(more, fill, dtype=dtype)])

    def _load_spaces(self, live: LiveRows) -> None:
        rows = live.rows
        if not len(rows):
            return
        pairs_bytes = np.concatenate(
            [
                rows["namespace"].copy().view(np.uint8).reshape(-1, 16),
                rows["salt"].copy().view(np.uint8).reshape(-1, 16),
            ],
            axis=1,
        )
        pairs = np.ascontiguousarray(pairs_bytes).view("V32").reshape(-1)
        _, first, which = np.unique(pairs, return_index=True, return_inverse=True)
        self.spaces = {
            (bytes(pairs_bytes[index, :16]), bytes(pairs_bytes[index, 16:])): number
            for number, index in enumerate(first)
        }
        self.c["space"][: len(rows)] = which.reshape(-1)

    def _load_snapshots(self, snapshots: Int64s, parents: Int64s) -> None:
        first, sibling = self.c["snapshot"], self.c["sibling"]
        above = parents[snapshots]
        first[above] = snapshots
        for entry in snapshots[first[above] != snapshots].tolist():  # a second snapshot at the same position
            sibling[entry] = sibling[first[parents[entry]]]
            sibling[first[parents[entry]]] = entry


def prefix_of(
    index: StoreIndex, snapshot: int, path: KvChain, tokens: bytes, salt: str | None, *, remote: bool = False
) -> StoredPrefix:
    c = index.c
    spans = tuple(
        StoredSpan(
            c["number"].item(entry),
            entry,
            c["position"].item(entry),
            c["position"].item(entry) + c["tokens"].item(entry),
            index.payload_size(entry),
            c["form"].item(entry),
        )
        for entry in path.entries
    )
    rounded = any(c["flags"].item(entry) & INEXACT for entry in (*path.entries, snapshot))
    return StoredPrefix(
        c["number"].item(snapshot),
        snapshot,
        path.end,
        spans,
        index.payload_size(snapshot),
        c["form"].item(snapshot),
        not rounded,
        tokens[: 4 * path.end],
        remote,
        salt,
    )


def snapshot_above(index: StoreIndex, path: KvChain, *, exact: bool) -> int:
    """Return the position of the deepest snapshot on ``path``, durable or not; 0 without one."""
    for depth in range(len(path.entries), 0, -1):
        entry = index.snapshot_at(KvChain((path.entries[depth - 1],), 0, 0), exact=exact, durable=False)
        if entry != NO_ENTRY:
            return int(index.c["position"][entry])
    return 0


def entries_of(prefix: StoredPrefix) -> list[tuple[int, int]]:
    """Return (entry, number) of the KV records and of the snapshot."""
    return [*((span.entry, span.record) for span in prefix.spans), (prefix.entry, prefix.snapshot)]


def is_current(index: StoreIndex, prefix: StoredPrefix) -> bool:
    """Return whether the entries of ``prefix`` still have the same records."""
    c = index.c
    return all(
        entry < index.length and c["kind"].item(entry) and c["number"].item(entry) == number
        for entry, number in entries_of(prefix)
    )


def places_of(prefix: StoredPrefix, start: int, page_bytes: int) -> Iterator[tuple[StoredSpan, int, int]]:
    """Yield (span, offset in the buffer, length in bytes) of each span that a fetch from ``start`` on reads. The first
    span of another form begins at a multiple of ``page_bytes``."""
    offset, form = 0, EXACT_FORM
    for span in prefix.spans:
        if span.end <= start:
            continue
        if span.form != form and page_bytes:
            offset = ceil_div(offset, page_bytes) * page_bytes
        pages = ceil_div(span.end - span.start, STORED_PAGE_TOKENS)
        skipped = max(0, start - span.start) // STORED_PAGE_TOKENS * (span.payload_bytes // pages)
        yield span, offset, span.payload_bytes - skipped
        offset, form = offset + span.payload_bytes - skipped, span.form


def reads_of(index: StoreIndex, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Iterator[RecordRead]:
    """Yield every KV record of the path, then the state. Records before ``start`` are read only for their tokens."""
    line = index.c["line"]
    kv, state = into.kv.cast("B"), into.state.cast("B")
    places = {span.record: (offset, length) for span, offset, length in places_of(prefix, start, into.page_bytes)}
    for span in prefix.spans:
        target, skip = None, 0
        if span.record in places:
            offset, length = places[span.record]
            assert offset + length <= len(kv), "the staging buffer of KV is too small"
            target, skip = kv[offset : offset + length], span.payload_bytes - length
        yield RecordRead(
            span.entry,
            span.record,
            line.item(span.entry),
            span.start,
            span.end - span.start,
            index.stored_size(span.payload_bytes),
            target,
            skip,
        )
    assert prefix.state_bytes <= len(state), "the staging buffer of the state is too small"
    yield RecordRead(
        prefix.entry,
        prefix.snapshot,
        line.item(prefix.entry),
        prefix.position,
        0,
        index.stored_size(prefix.state_bytes),
        state[: prefix.state_bytes],
    )
