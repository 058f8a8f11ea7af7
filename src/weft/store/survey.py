"""Contents of a directory or a bucket, and checks of every byte: ``weft store``, except pruning of directories.

    directory --ledger--> live rows --> totals by model
                                    --> each payload read, each checksum and chain compared
    bucket    --segments of all writers--> rows --> totals by model
                                                --> each payload read, its checksum compared with its key
              prune: payloads that no segment names; with a size, the oldest too; segments without payloads

Everything but ``prune`` and ``rm`` works while servers use the store. A server that evicts meanwhile reuses blocks;
``verify`` therefore reads the ledger again before it calls a record damaged. An object that is gone is a miss. A
payload without a segment may belong to an upload under way, so a prune spares payloads that are younger than
``YOUNG_S``. A bucket stores no use counts, so a prune to a size deletes the oldest objects.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from weft.errors import ConfigError
from weft.store.bucket import Bucket, Stored
from weft.store.disk import OsDisk
from weft.store.identity import NAMESPACES_FOLDER
from weft.store.ledger import (
    INEXACT,
    KV,
    SEALED,
    SNAPSHOT,
    LedgerRows,
    chain_of,
    payload_checksum,
    root_chain,
    token_size,
)
from weft.store.opening import LOCK_FILE, PARAM, OpenDirectory, open_directory, read_ledger
from weft.store.reading import reason_of
from weft.store.recovery import LiveRows
from weft.store.space import BLOCK_BYTES
from weft.store.uploads import rows_of_segment


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """Totals of one namespace. ``facts``: its JSON, empty if the file is missing."""

    namespace: str
    model: str
    snapshots: int
    kv_records: int
    tokens: int
    payload_bytes: int
    salted: int
    inexact: int
    restores: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoreSurvey:
    """Contents of a directory. ``holder``: the process that writes to the directory now, empty if there is none."""

    path: str
    models: tuple[ModelTotals, ...]
    volumes: int
    allocated_bytes: int
    used_bytes: int
    ledger_rows: int
    generation: int
    dropped_rows: dict[str, int]
    holder: str
    notes: tuple[str, ...]


@dataclass(slots=True)
class VerifyResult:
    """Result of a verification. ``damaged``: (number, reason) of each record that is wrong."""

    records: int = 0
    payload_bytes: int = 0
    damaged: list[tuple[int, str]] = field(default_factory=list)
    dropped_rows: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.damaged and not self.dropped_rows


def survey(path: Path) -> StoreSurvey:
    """Return the contents of a directory. Raise ConfigError for a path that is not a store."""
    with contextlib.closing(open_directory(path, OsDisk(), write=False)) as opened:
        return _survey(opened)


def verify(path: Path, progress: Progress, disk: OsDisk | None = None) -> VerifyResult:
    """Read and verify every payload and its tokens, except encrypted tokens. ``progress``: (records done, records).
    Raise ConfigError."""
    with contextlib.closing(open_directory(path, disk or OsDisk(), write=False)) as opened:
        result = VerifyResult(dropped_rows=dict(opened.live.dropped) if opened.live is not None else {})
        if opened.live is None or opened.ledger is None:
            return result
        suspects = _suspects(opened, opened.live, result, progress)
        if suspects:
            _, now = read_ledger(path, opened.disk, opened.volume_blocks, writable=False)
            numbers = set(now.rows["number"].tolist()) if now is not None else set()
            result.damaged = [suspect for suspect in suspects if suspect[0] in numbers]
        return result


def _suspects(opened: OpenDirectory, live: LiveRows, result: VerifyResult, progress: Progress) -> list[tuple[int, str]]:
    assert opened.ledger is not None
    suspects: list[tuple[int, str]] = []
    chains: list[int] = []
    for done, (row, parent) in enumerate(zip(live.rows, live.parents.tolist(), strict=True)):
        progress(done, len(live.rows))
        chain = chains[parent] if parent >= 0 else root_chain(row["namespace"].tobytes(), row["salt"].tobytes())
        reason = ""
        try:
            if row["kind"] == KV:
                chain = chain_of(chain, opened.ledger.read_tokens(int(row["tokens_at"]), token_size(row)))
            payload = memoryview(bytearray(int(row["payload_bytes"])))
            if len(payload):
                opened.volumes.read_payload(row, payload)
            if payload_checksum(payload) != row["checksum"].tobytes():
                reason = "checksum"
            elif chain != int(row["chain"]) and not row["flags"] & SEALED:
                reason = "tokens"
        except OSError as error:
            reason = error.strerror or str(error)
        chains.append(int(row["chain"]))
        result.records += 1
        result.payload_bytes += int(row["payload_bytes"])
        if reason:
            suspects.append((int(row["number"]), reason))
    progress(len(live.rows), len(live.rows))
    return suspects


def _survey(opened: OpenDirectory) -> StoreSurvey:
    live, ledger = opened.live, opened.ledger
    models: list[ModelTotals] = []
    folder = opened.path / NAMESPACES_FOLDER
    if live is not None:
        for namespace in np.unique(live.rows["namespace"]):
            mask = live.rows["namespace"] == namespace
            name = namespace.tobytes().hex()
            models.append(
                _totals(
                    name,
                    functools.partial(opened.disk.read_file, folder / f"{name}.json"),
                    live.rows[mask],
                    int(live.uses[mask].sum()),
                )
            )
    payloads = live.rows["payload_bytes"] if live is not None else np.zeros(0, dtype=np.uint64)
    used = int(((payloads + np.uint64(BLOCK_BYTES - 1)) // np.uint64(BLOCK_BYTES)).sum()) * BLOCK_BYTES
    return StoreSurvey(
        str(opened.path),
        tuple(sorted(models, key=lambda model: -model.payload_bytes)),
        len(opened.volume_blocks),
        sum(opened.volume_blocks.values()) * BLOCK_BYTES,
        used,
        ledger.row_count - 1 if ledger is not None else 0,
        ledger.generation if ledger is not None else 0,
        dict(live.dropped) if live is not None else {},
        _holder(opened),
        tuple(opened.notes),
    )


def _totals(namespace: str, read_facts: Callable[[], bytes], rows: LedgerRows, restores: int = 0) -> ModelTotals:
    """Return totals of the rows of one namespace; ``read_facts`` reads its JSON."""
    facts: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads(read_facts())
    kv = rows["kind"] == KV
    return ModelTotals(
        namespace,
        str(facts.get("model", "unknown")),
        int((rows["kind"] == SNAPSHOT).sum()),
        int(kv.sum()),
        int(rows["tokens"][kv].sum()),
        int(rows["payload_bytes"].sum()),
        int((rows["salt"] != np.void(bytes(16))).sum()),
        int((rows["flags"] & INEXACT != 0).sum()),
        restores,
        facts,
    )


def _holder(opened: OpenDirectory) -> str:
    """Return the process in the lock file, if it holds the lock."""
    disk, path = opened.disk, opened.path / LOCK_FILE
    try:
        with disk.reading(path) as handle:
            free = disk.lock(handle)
        return "" if free else disk.read_file(path).decode("utf-8", "replace").strip()
    except OSError:
        return ""


P = ParamSpec("P")
T = TypeVar("T")
YOUNG_S = 3600.0
ROOT = "v1/"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BucketSurvey:
    """Contents of a bucket. ``models``: totals of segments. ``payloads``, ``payload_bytes``: the objects that are in
    the bucket."""

    location: str
    models: tuple[ModelTotals, ...]
    segments: int
    payloads: int
    payload_bytes: int


@dataclass(slots=True)
class BucketVerified:
    """Result of a verification. ``damaged``: (key, reason) of each damaged object. ``missing``: number of payloads that
    a segment names and the bucket does not have, which are misses, not damage."""

    objects: int = 0
    payload_bytes: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing: int = 0

    @property
    def good(self) -> bool:
        return not self.damaged


@dataclass(frozen=True, slots=True)
class BucketPruned:
    removed: int
    removed_bytes: int
    objects: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class _Contents:
    """Segments and payloads of a bucket. ``rows``: by key of the segment. ``payloads``: by key."""

    rows: dict[str, LedgerRows]
    segments: dict[str, Stored]
    damaged_segments: tuple[str, ...]
    payloads: dict[str, Stored]

    def named_by(self, segment: str) -> set[str]:
        """Return the keys of the payloads that the rows of ``segment`` name."""
        namespace = segment.split("/")[2]
        return {
            f"{ROOT}records/{namespace}/{row['checksum'].tobytes().hex()}-{int(row['payload_bytes'])}"
            for row in self.rows[segment]
            if row["payload_bytes"]
        }

    def named(self) -> set[str]:
        """Return the keys of the payloads that any row names."""
        return set().union(*map(self.named_by, self.rows))


def _answered(call: Callable[Concatenate[Bucket, P], T]) -> Callable[Concatenate[Bucket, P], T]:
    """Return ``call`` with a ConfigError, in the bucket's words, where the bucket does not answer, or refuses."""

    @functools.wraps(call)
    def answer(bucket: Bucket, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(bucket, *args, **kwargs)
        except OSError as error:
            said = bucket.last_error or reason_of(error)
            raise ConfigError(f"--store {bucket.location}: {said}", param=PARAM) from None

    return answer


@_answered
def survey_bucket(bucket: Bucket) -> BucketSurvey:
    """Return the contents of a bucket. Raise ConfigError if the bucket does not answer."""
    contents = _contents(bucket)
    by_namespace: dict[str, list[LedgerRows]] = {}
    for key, rows in contents.rows.items():
        by_namespace.setdefault(key.split("/")[2], []).append(rows)
    models = [_bucket_totals(bucket, namespace, np.concatenate(parts)) for namespace, parts in by_namespace.items()]
    return BucketSurvey(
        bucket.location,
        tuple(sorted(models, key=lambda model: -model.payload_bytes)),
        len(contents.segments),
        len(contents.payloads),
        sum(stored.nbytes for stored in contents.payloads.values()),
    )


@_answered
def verify_bucket(bucket: Bucket, progress: Progress) -> BucketVerified:
    """Read every object. Raise ConfigError if the bucket does not answer."""
    contents = _contents(bucket)
    result = BucketVerified(damaged=[(key, "segment") for key in contents.damaged_segments])
    for done, key in enumerate(contents.payloads):
        progress(done, len(contents.payloads))
        try:
            payload = bucket.read_all(key)
        except FileNotFoundError:
            continue
        result.objects += 1
        result.payload_bytes += len(payload)
        if key.rpartition("/")[2] != f"{payload_checksum(payload).hex()}-{len(payload)}":
            result.damaged.append((key, "checksum"))
    progress(len(contents.payloads), len(contents.payloads))
    result.missing = len(contents.named() - contents.payloads.keys())
    return result


@_answered
def prune_bucket(bucket: Bucket, *, size_bytes: int | None, progress: Progress) -> BucketPruned:
    """Delete payloads that no segment names, and the oldest. Raise ConfigError if the bucket does not answer or refuses
    to delete."""
    contents = _contents(bucket)
    now, named = datetime.now(UTC), contents.named()
    going = {
        key
        for key, stored in contents.payloads.items()
        if key not in named and (now - stored.modified).total_seconds() > YOUNG_S
    }
    left = sum(stored.nbytes for key, stored in contents.payloads.items() if key not in going)
    for key, stored in sorted(contents.payloads.items(), key=lambda item: item[1].modified):
        if size_bytes is None or left <= size_bytes:
            break
        if key not in going:
            going.add(key)
            left -= stored.nbytes
    result = _removed(bucket, contents, going, progress)
    left_over = contents.payloads.keys() - going
    for segment in contents.rows:
        if contents.named_by(segment).isdisjoint(left_over):
            bucket.delete(segment)
    return result


@_answered
def remove_from_bucket(bucket: Bucket, namespaces: Collection[str], progress: Progress) -> BucketPruned:
    """Remove every object of ``namespaces``, segments first. Raise ConfigError."""
    contents = _contents(bucket)
    segments = [key for key in contents.segments if key.split("/")[2] in namespaces]
    for key in [*segments, *(f"{ROOT}namespaces/{namespace}.json" for namespace in namespaces)]:
        bucket.delete(key)
    return _removed(bucket, contents, {key for key in contents.payloads if key.split("/")[2] in namespaces}, progress)


def _removed(bucket: Bucket, contents: _Contents, keys: Collection[str], progress: Progress) -> BucketPruned:
    for done, key in enumerate(sorted(keys)):
        progress(done, len(keys))
        bucket.delete(key)
    progress(len(keys), len(keys))
    removed_bytes = sum(contents.payloads[key].nbytes for key in keys)
    total = sum(stored.nbytes for stored in contents.payloads.values())
    return BucketPruned(len(keys), removed_bytes, len(contents.payloads) - len(keys), total - removed_bytes)


def _contents(bucket: Bucket) -> _Contents:
    segments = {stored.key: stored for stored in bucket.objects(f"{ROOT}ledger/")}
    rows: dict[str, LedgerRows] = {}
    damaged = []
    for key in sorted(segments):
        parsed = rows_of_segment(bucket.read_all(key))
        if parsed is None:
            damaged.append(key)
        else:
            rows[key] = parsed
    return _Contents(
        rows, segments, tuple(damaged), {stored.key: stored for stored in bucket.objects(f"{ROOT}records/")}
    )


def _bucket_totals(bucket: Bucket, namespace: str, rows: LedgerRows) -> ModelTotals:
    """Return the totals of one namespace. Several writers may name one payload: its bytes count once."""
    _, first = np.unique(rows["checksum"], return_index=True)
    totals = _totals(namespace, lambda: bucket.read_all(f"{ROOT}namespaces/{namespace}.json"), rows)
    return replace(totals, payload_bytes=int(rows["payload_bytes"][first].sum()))
