"""``open_store``, and ``TieredStore``: a bucket, with a directory as a cache in front of it.

    /data/prefixes      a directory                                     DirectoryStore
    s3://bucket/prefix  a bucket, gs:// az:// file:// alike, with a     TieredStore
                        directory as a cache in front of it

    match   the deeper of both; the directory's if they are equally deep
    fetch   from where the match was; what came from the bucket is put into the directory
    put     into the directory; its durable snapshots are uploaded from there (``uploads``)

Several servers share a bucket: each reads the segments of all writers. The bucket's index belongs to the
engine's thread like the directory's. After a failed request, ``match`` passes the bucket by
for a few seconds. So a bucket that goes away costs a waiting request one timeout at most.

Laws: L8, L10 (the same compare and checksum for both), L3 (a bucket that is away is a miss).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weft.errors import ConfigError
from weft.memory.prefix_store import (
    KvPiece,
    NewSnapshot,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    StoredPrefix,
    StoreEvent,
    Ticket,
    token_bytes,
)
from weft.memory.usage import StoreStats
from weft.store.bucket import Bucket, record_key
from weft.store.directory_store import FINAL_WRITES_S, DirectoryStore
from weft.store.disk import OsDisk
from weft.store.eviction import subtree
from weft.store.identity import NAMESPACES_FOLDER, NamespaceIdentity
from weft.store.index import NO_ENTRY, KvChain, StoreIndex, is_current, places_of, prefix_of, reads_of
from weft.store.ledger import SNAPSHOT
from weft.store.location import is_bucket
from weft.store.opening import PARAM, StoreOptions, open_directory, write_namespace
from weft.store.reading import UNREACHABLE, FetchThreads, RecordFetch
from weft.store.sealing import FLAG
from weft.store.signing import read_signer
from weft.store.uploads import BucketThread, RemoteIndex, RemoteLedger, UploadJob
from weft.units import format_bytes


@dataclass(frozen=True, slots=True)
class BucketSource:
    """The source of a bucket's payloads."""

    bucket: Bucket
    namespace: str

    def read_payload(self, row: np.void, into: memoryview) -> None:
        self.bucket.read(record_key(self.namespace, row["checksum"].tobytes(), len(into)), into)


@dataclass(frozen=True, slots=True)
class RemoteFetch:
    """A fetch from the bucket under way, with the data that its copy for the directory needs."""

    prefix: StoredPrefix
    start: int
    into: StagingBuffers


class TieredStore:
    """A bucket with a directory in front. The store owns ``local`` and ``bucket`` from now on."""

    def __init__(self, local: DirectoryStore, bucket: Bucket, *, refresh_s: float = 10.0) -> None:
        self.local, self.bucket = local, bucket
        sealer = local.records.index.sealer
        self.remote = StoreIndex(local.records.index.forms, sealer)
        opened = local.opened
        folder = opened.path / "remote" / local.identity.digest.hex()
        self._remote_ledger = RemoteLedger(folder, opened.disk)
        self._outcomes: queue.SimpleQueue[RecordFetch | RemoteIndex] = queue.SimpleQueue()
        source = BucketSource(bucket, local.identity.digest.hex())
        self._reader = FetchThreads(source, self._outcomes.put, sealer=sealer)
        self.uploads = BucketThread(
            bucket,
            local.identity,
            self._remote_ledger,
            opened.volumes,
            self._outcomes.put,
            refresh_s=refresh_s,
            forms=local.records.index.forms,
            sealer=sealer,
        )
        self._fetches: dict[Ticket, RemoteFetch] = {}
        self._puts: dict[Ticket, tuple[str | None, bytes, bool]] = {}
        self._restored: dict[Ticket, StoredPrefix] = {}
        self._copies: set[Ticket] = set()
        self._ticket = 0
        self.hits = self.fetched_bytes = self.failures = 0
        self._was_available, self._remote_changes = True, 0

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        near = self.local.match(salt, tokens, above)
        root = self.local.root(salt)
        if root is None or not self.bucket.available:
            return near
        content = token_bytes(tokens)
        hit = self.remote.deepest(
            root[1], content, above=near.position if near is not None else above, exact=self.local.exact
        )
        if hit is None:
            return near
        return prefix_of(self.remote, *hit, content, salt, remote=True)

    @property
    def changes(self) -> int:
        return self.local.changes + self._remote_changes

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        if not prefix.remote:
            ticket = self.local.fetch(prefix, start, into)
            self._restored[ticket] = prefix
            return ticket
        self._ticket -= 1
        ticket = Ticket(self._ticket)
        if not is_current(self.remote, prefix):
            self.local.records.events.append(StoreEvent(ticket, "missing", "evicted"))
            return ticket
        self._fetches[ticket] = RemoteFetch(prefix, start, into)
        self._reader.submit(
            RecordFetch(
                ticket,
                self._remote_ledger,
                tuple(reads_of(self.remote, prefix, start, into)),
                prefix.tokens,
                time.monotonic(),
            )
        )
        return ticket

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        return self.local.offer(salt, tokens, position, exact=exact)

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        ticket = self.local.put(snapshot)
        if ticket is not None:
            self._puts[ticket] = (snapshot.salt, snapshot.tokens, snapshot.exact)
        return ticket

    def clear(self) -> None:
        """Clear the directory. Records in the bucket belong to all servers that share it."""
        self.local.clear()

    def poll(self) -> list[StoreEvent]:
        events = []
        if self.bucket.available != self._was_available:
            self._was_available = not self._was_available
            self._remote_changes += 1
        for event in self.local.poll():
            if event.ticket in self._puts:
                salt, tokens, exact = self._puts.pop(event.ticket)
                if event.kind == "written":
                    self._upload(salt, tokens, exact=exact)
            restored = self._restored.pop(event.ticket, None)
            if restored is not None and event.kind == "fetched":
                self._submit(restored)
            if event.ticket in self._copies:
                self._copies.discard(event.ticket)
            else:
                events.append(event)
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except queue.Empty:
                return events
            if isinstance(outcome, RemoteIndex):
                self.remote = outcome.index
                self._remote_changes += 1
            else:
                events.append(self._fetched(outcome))

    def stats(self) -> StoreStats:
        counts = dict(self.uploads.counts)
        snapshot_count = int((self.remote.c["kind"][: self.remote.length] == SNAPSHOT).sum())
        stats = self.local.stats()
        fault = self.bucket.fault
        away: tuple[str, ...] = () if not fault else (f"{self.bucket.location} does not answer: {fault}; uploads wait",)
        if counts.get("segments_left_out"):
            away += (
                f"the ledger of {self.bucket.location} is larger than "
                f"{format_bytes(self.uploads.segment_bytes_max)}: {counts['segments_left_out']} of its "
                f"segments are left out; `weft store prune {self.bucket.location}` makes it smaller",
            )
        return replace(
            stats,
            path=self.bucket.location,
            notes=(*stats.notes, *away),
            remote={
                **counts,
                "snapshots": snapshot_count,
                "hits": self.hits,
                "fetched_bytes": self.fetched_bytes,
                "failures": self.failures,
                "waiting_uploads": self.uploads.waiting,
                "lost_uploads": self.uploads.lost,
            },
            bucket_fault=fault,
            unreachable_s=self.bucket.unreachable_s,
        )

    def close(self) -> None:
        self.uploads.close(FINAL_WRITES_S)
        self._reader.close(1.0)
        self.local.close()

    def _fetched(self, fetch: RecordFetch) -> StoreEvent:
        under_way = self._fetches.pop(fetch.ticket)
        seconds = time.monotonic() - fetch.started
        if fetch.failure is None:
            self.hits += 1
            self.fetched_bytes += fetch.nbytes
            self._copy(under_way)
            return StoreEvent(fetch.ticket, "fetched", "", fetch.nbytes, seconds)
        kind, reason, entry, number = fetch.failure
        self.failures += 1
        if reason != UNREACHABLE:
            self.local.records.counters.damaged[f"remote {reason}"] += 1
            self._remote_ledger.lose(number)
            if entry < self.remote.length and self.remote.c["number"].item(entry) == number:
                for victim in subtree(self.remote, entry):
                    self.remote.remove(victim)
                self._remote_changes += 1
        return StoreEvent(fetch.ticket, kind, reason, 0, seconds)

    def _copy(self, fetch: RemoteFetch) -> None:
        """Put bytes that came from the bucket into the directory, if its KV is complete there or in the buffers."""
        prefix, salt = fetch.prefix, fetch.prefix.salt
        tokens = np.frombuffer(prefix.tokens, dtype="<i4")
        offer = self.local.offer(salt, tokens, prefix.position, exact=prefix.exact)
        if offer is None or offer.start < fetch.start:
            return
        kv = memoryview(bytes(fetch.into.kv))
        pieces = tuple(
            KvPiece(span.start, span.end, kv[offset : offset + length], span.form)
            for span, offset, length in places_of(prefix, fetch.start, fetch.into.page_bytes)
            if span.start >= offer.start
        )
        if (pieces[0].start if pieces else prefix.position) != offer.start:
            return
        ticket = self.local.put(
            NewSnapshot(
                salt,
                prefix.tokens,
                pieces,
                memoryview(bytes(fetch.into.state[: prefix.state_bytes])),
                prefix.exact,
                state_form=prefix.state_form,
            )
        )
        if ticket is not None:
            self._copies.add(ticket)

    def _upload(self, salt: str | None, tokens: bytes, *, exact: bool) -> None:
        root = self.local.root(salt)
        if root is None:
            return
        index = self.local.records.index
        hit = index.deepest(root[1], tokens, above=len(tokens) // 4 - 1, exact=exact)
        if hit is not None:
            self._submit_entries(index, *hit)

    def _submit(self, prefix: StoredPrefix) -> None:
        """Upload a snapshot that was restored from the directory if the bucket lacks it."""
        index = self.local.records.index
        if is_current(index, prefix) and not self._in_bucket(prefix):
            path = KvChain(tuple(span.entry for span in prefix.spans), prefix.position, 0)
            self._submit_entries(index, prefix.entry, path)

    def _in_bucket(self, prefix: StoredPrefix) -> bool:
        """Return whether this process has uploaded ``prefix``, or the bucket's index has it."""
        chain, c = self.local.records.index.c["chain"][prefix.entry], self.remote.c
        return prefix.snapshot in self.uploads.sent or bool(((c["chain"] == chain) & (c["kind"] == SNAPSHOT)).any())

    def _submit_entries(self, index: StoreIndex, snapshot: int, path: KvChain) -> None:
        c, ledger = index.c, self.local.records.ledger
        assert ledger is not None
        assert snapshot != NO_ENTRY
        self.uploads.submit(
            UploadJob(
                ledger, tuple((c["number"].item(entry), c["line"].item(entry)) for entry in (*path.entries, snapshot))
            )
        )


CACHE_FOLDER = "~/.cache/weft/store"


def open_store(
    location: str | Path, identity: NamespaceIdentity, options: StoreOptions
) -> DirectoryStore | TieredStore:
    """Open the store at a directory or a bucket. Raise ConfigError that names the place and the setting to change. A
    directory that another process writes to, or without permission to write, is opened for reading; ``stats().notes``
    says so."""
    if not is_bucket(str(location)):
        return open_local(Path(location).expanduser(), identity, options)
    signer = None if options.key_file is None else read_signer(options.key_file, flag="cache.store_key")
    bucket = Bucket(str(location), signer=signer)
    fault = bucket.check()
    if fault and options.required:
        raise ConfigError(
            f"--store {location} does not answer: {fault}; without cache.store_required the server starts anyway",
            param=PARAM,
        )
    local = open_local(cache_directory(bucket.location, options), identity, options)
    return TieredStore(local, bucket, refresh_s=options.refresh_s)


def cache_directory(location: str, options: StoreOptions) -> Path:
    """Return the directory in front of a bucket: one for each location."""
    if options.cache_directory is not None:
        return Path(options.cache_directory).expanduser()
    return Path(CACHE_FOLDER).expanduser() / hashlib.sha256(location.encode()).hexdigest()[:16]


def open_local(
    directory: Path, identity: NamespaceIdentity, options: StoreOptions, *, disk: OsDisk | None = None
) -> DirectoryStore:
    disk = disk or OsDisk()
    opened = open_directory(directory, disk)
    if opened.writable:
        try:
            write_namespace(directory, disk, identity)
        except OSError as error:
            opened.close()
            raise ConfigError(f"--store {directory}: {error.strerror}", param=PARAM) from None
    store = DirectoryStore(opened, identity, options)
    note = _other_keys(store)
    if note:
        opened.notes.append(note)
    return store


def _other_keys(store: DirectoryStore) -> str:
    """Return a line about snapshots of the same model with another key than ``store``, "" if there are none."""
    opened, own = store.opened, store.identity
    plain, counts = own.without_key, Counter[str]()
    for namespace, snapshots in store.records.snapshots_by_namespace().items():
        with contextlib.suppress(OSError, ValueError, TypeError):
            content = opened.disk.read_file(opened.path / NAMESPACES_FOLDER / f"{namespace.hex()}.json")
            other = NamespaceIdentity(**json.loads(content))
            if namespace != own.digest and other.without_key == plain:
                why = "not encrypted" if other.key is None else "encrypted with another key"
                counts["encrypted, and no key is given" if own.key is None else why] += snapshots
    sentence = ", ".join(
        f"{count:,} snapshots of this model are {why}" for why, count in sorted(counts.items()) if count
    )
    return f"{opened.path}: {sentence} ({FLAG}): they are not used" if sentence else ""
