"""From an index to the values of the protocol, and from those to reads. One form for disk and bucket.

    (checkpoint entry, KV entries) --prefix_of--> StoredPrefix --reads_of, start, buffers--> RecordRead ...

Law: L8. The spans of a prefix follow one another from token 0 to its position.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.memory.prefix_store import EXACT_FORM, GRAIN_TOKENS, StagingBuffers, StoredPrefix, StoredSpan
from weft.store.index import NO_ENTRY, KvChain, StoreIndex
from weft.store.reading import RecordRead
from weft.store.rows import INEXACT
from weft.units import ceil_div


def prefix_of(index: StoreIndex, checkpoint: int, path: KvChain, tokens: bytes, salt: str | None, *,
              remote: bool = False) -> StoredPrefix:
    c = index.c
    spans = tuple(StoredSpan(c["number"].item(entry), entry, c["position"].item(entry),
                             c["position"].item(entry) + c["tokens"].item(entry),
                             c["payload"].item(entry), c["form"].item(entry)) for entry in path.entries)
    rounded = any(c["flags"].item(entry) & INEXACT for entry in (*path.entries, checkpoint))
    return StoredPrefix(c["number"].item(checkpoint), checkpoint, path.end, spans,
                        c["payload"].item(checkpoint), c["form"].item(checkpoint), not rounded,
                        tokens[:4 * path.end], remote, salt)


def checkpoint_above(index: StoreIndex, path: KvChain, *, exact: bool) -> int:
    """The position of the deepest checkpoint on ``path``, durable or not; 0 without one."""
    for at in range(len(path.entries), 0, -1):
        entry = index.checkpoint_at(KvChain((path.entries[at - 1],), 0, 0), exact=exact, durable=False)
        if entry != NO_ENTRY:
            return int(index.c["position"][entry])
    return 0


def entries_of(prefix: StoredPrefix) -> list[tuple[int, int]]:
    """(entry, number) of the KV records and of the checkpoint."""
    return [*((span.entry, span.record) for span in prefix.spans), (prefix.entry, prefix.checkpoint)]


def is_current(index: StoreIndex, prefix: StoredPrefix) -> bool:
    """Whether the entries of ``prefix`` still are its records."""
    c = index.c
    return all(entry < index.length and c["kind"].item(entry) and c["number"].item(entry) == number
               for entry, number in entries_of(prefix))


def places_of(prefix: StoredPrefix, start: int,
              page_bytes: int) -> Iterator[tuple[StoredSpan, int, int]]:
    """The spans that a fetch from ``start`` on reads: each with the byte of the buffer where it begins, and
    its length there. A new form begins at a multiple of ``page_bytes``."""
    at, form = 0, EXACT_FORM
    for span in prefix.spans:
        if span.end <= start:
            continue
        if span.form != form and page_bytes:
            at = ceil_div(at, page_bytes) * page_bytes
        grains = ceil_div(span.end - span.start, GRAIN_TOKENS)
        skipped = max(0, start - span.start) // GRAIN_TOKENS * (span.payload_bytes // grains)
        yield span, at, span.payload_bytes - skipped
        at, form = at + span.payload_bytes - skipped, span.form


def reads_of(index: StoreIndex, prefix: StoredPrefix, start: int,
             into: StagingBuffers) -> Iterator[RecordRead]:
    """Every KV record of the path, those before ``start`` for their tokens alone, and the state."""
    line = index.c["line"]
    kv, state = into.kv.cast("B"), into.state.cast("B")
    places = {span.record: (at, length) for span, at, length in places_of(prefix, start, into.page_bytes)}
    for span in prefix.spans:
        target, skip = None, 0
        if span.record in places:
            at, length = places[span.record]
            assert at + length <= len(kv), "the staging buffer of KV is too small"
            target, skip = kv[at:at + length], span.payload_bytes - length
        yield RecordRead(span.entry, span.record, line.item(span.entry), span.start, span.end - span.start,
                         span.payload_bytes, target, skip)
    assert prefix.state_bytes <= len(state), "the staging buffer of the state is too small"
    yield RecordRead(prefix.entry, prefix.checkpoint, line.item(prefix.entry), prefix.position, 0,
                     prefix.state_bytes, state[:prefix.state_bytes])
