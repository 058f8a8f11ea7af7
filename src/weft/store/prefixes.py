"""From an index to the values of the protocol, and from those to reads. One form for disk and bucket.

    (checkpoint entry, KV entries) --prefix_of--> StoredPrefix --reads_of, start, buffers--> RecordRead ...

Law: L8. The spans of a prefix follow one another from token 0 to its position.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.store.index import KvChain, StoreIndex
from weft.store.reading import RecordRead
from weft.store.rows import INEXACT
from weft.store.values import GRAIN_TOKENS, StagingBuffers, StoredPrefix, StoredSpan


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


def entries_of(prefix: StoredPrefix) -> list[tuple[int, int]]:
    """(entry, number) of the KV records and of the checkpoint."""
    return [*((span.entry, span.record) for span in prefix.spans), (prefix.entry, prefix.checkpoint)]


def is_current(index: StoreIndex, prefix: StoredPrefix) -> bool:
    """Whether the entries of ``prefix`` still are its records."""
    c = index.c
    return all(entry < index.length and c["kind"].item(entry) and c["number"].item(entry) == number
               for entry, number in entries_of(prefix))


def reads_of(index: StoreIndex, prefix: StoredPrefix, start: int,
             into: StagingBuffers) -> Iterator[RecordRead]:
    """Every KV record of the path, those before ``start`` for their tokens alone, and the state."""
    line, at = index.c["line"], 0
    kv, state = into.kv.cast("B"), into.state.cast("B")
    for span in prefix.spans:
        target, skip = None, 0
        if span.end > start:
            if span.start < start and span.form == 0:
                grains = -(-(span.end - span.start) // GRAIN_TOKENS)
                skip = (start - span.start) // GRAIN_TOKENS * (span.payload_bytes // grains)
            target = kv[at:at + span.payload_bytes - skip]
            at += span.payload_bytes - skip
        yield RecordRead(span.entry, span.record, line.item(span.entry), span.start, span.end - span.start,
                         span.payload_bytes, target, skip)
    assert at <= len(kv), "the staging buffer of KV is too small"
    assert prefix.state_bytes <= len(state), "the staging buffer of the state is too small"
    yield RecordRead(prefix.entry, prefix.checkpoint, line.item(prefix.entry), prefix.position, 0,
                     prefix.state_bytes, state[:prefix.state_bytes])
