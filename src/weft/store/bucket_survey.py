"""What a bucket holds, whether it is right, and space given back: ``weft store`` on a bucket's address.

    info     segments of all writers --> totals by model
    verify   every payload read, its checksum compared with its key; the payloads that segments name are there
    prune    payloads that no segment names; with a size, the oldest as well; segments without payloads
    rm       every object of a model

Servers may go on meanwhile: an object that is gone is a miss to them. A payload without a segment may belong
to an upload under way, so ``prune`` leaves payloads alone that are younger than ``YOUNG_S``.

A bucket has no uses of a record, so size is given back by age. Rejected: to rewrite segments without the rows
of removed payloads (a writer's next segment names parents in them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import numpy as np

from weft.errors import ConfigError
from weft.store.bucket import Bucket, Stored
from weft.store.opening import PARAM
from weft.store.reading import reason_of
from weft.store.rows import CHECKPOINT, INEXACT, KV, LedgerRows, payload_checksum
from weft.store.segments import rows_of_segment
from weft.store.survey import ModelTotals

YOUNG_S = 3600.0
ROOT = "v1/"
Progress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BucketSurvey:
    """``models``: what segments name. ``payloads``, ``payload_bytes``: the objects that are in the bucket."""

    location: str
    models: tuple[ModelTotals, ...]
    segments: int
    payloads: int
    payload_bytes: int


@dataclass(slots=True)
class BucketVerified:
    """``damaged``: (key, reason) of each object that is wrong. ``missing``: payloads that a segment names and
    the bucket has not: a miss, and no damage."""

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
    """``rows``: by key of their segment. ``payloads``: by key."""

    rows: dict[str, LedgerRows]
    segments: dict[str, Stored]
    damaged_segments: tuple[str, ...]
    payloads: dict[str, Stored]

    def named_by(self, segment: str) -> set[str]:
        """Keys of the payloads that the rows of ``segment`` name."""
        namespace = segment.split("/")[2]
        return {f"{ROOT}records/{namespace}/{row['checksum'].tobytes().hex()}-{int(row['payload_bytes'])}"
                for row in self.rows[segment] if row["payload_bytes"]}

    def named(self) -> set[str]:
        """Keys of the payloads that any row names."""
        return set().union(*map(self.named_by, self.rows))


def survey_bucket(bucket: Bucket) -> BucketSurvey:
    """Raises ConfigError if the bucket does not answer."""
    contents = _reading(bucket, lambda: _contents(bucket))
    by_namespace: dict[str, list[LedgerRows]] = {}
    for key, rows in contents.rows.items():
        by_namespace.setdefault(key.split("/")[2], []).append(rows)
    models = [_totals(bucket, namespace, np.concatenate(parts)) for namespace, parts in by_namespace.items()]
    return BucketSurvey(bucket.location, tuple(sorted(models, key=lambda one: -one.payload_bytes)),
                        len(contents.segments), len(contents.payloads),
                        sum(one.nbytes for one in contents.payloads.values()))


def verify_bucket(bucket: Bucket, progress: Progress) -> BucketVerified:
    """Reads every object. Raises ConfigError if the bucket does not answer."""
    contents = _reading(bucket, lambda: _contents(bucket))
    result = BucketVerified(damaged=[(key, "segment") for key in contents.damaged_segments])
    for done, key in enumerate(contents.payloads):
        progress(done, len(contents.payloads))
        try:
            payload = bucket.read_all(key)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{bucket.location}: {reason_of(error)}", param=PARAM) from None
        result.objects += 1
        result.payload_bytes += len(payload)
        if key.rpartition("/")[2] != f"{payload_checksum(payload).hex()}-{len(payload)}":
            result.damaged.append((key, "checksum"))
    progress(len(contents.payloads), len(contents.payloads))
    result.missing = len(contents.named() - contents.payloads.keys())
    return result


def prune_bucket(bucket: Bucket, *, size_bytes: int | None, progress: Progress,
                 now: datetime | None = None) -> BucketPruned:
    """Raises ConfigError if the bucket does not answer or refuses to delete."""
    contents = _reading(bucket, lambda: _contents(bucket))
    now, named = now or datetime.now(UTC), contents.named()
    going = {key for key, one in contents.payloads.items()
             if key not in named and (now - one.modified).total_seconds() > YOUNG_S}
    left = sum(one.nbytes for key, one in contents.payloads.items() if key not in going)
    for key, one in sorted(contents.payloads.items(), key=lambda item: item[1].modified):
        if size_bytes is None or left <= size_bytes:
            break
        if key not in going:
            going.add(key)
            left -= one.nbytes
    result = _removed(bucket, contents, going, progress)
    left_over = contents.payloads.keys() - going
    for segment in contents.rows:
        if contents.named_by(segment).isdisjoint(left_over):
            _reading(bucket, partial(bucket.delete, segment))
    return result


def remove_from_bucket(bucket: Bucket, namespaces: Collection[str], progress: Progress) -> BucketPruned:
    """Removes every object of ``namespaces``, segments first. Raises ConfigError."""
    contents = _reading(bucket, lambda: _contents(bucket))
    segments = [key for key in contents.segments if key.split("/")[2] in namespaces]
    for key in [*segments, *(f"{ROOT}namespaces/{one}.json" for one in namespaces)]:
        _reading(bucket, partial(bucket.delete, key))
    return _removed(bucket, contents, {key for key in contents.payloads if key.split("/")[2] in namespaces},
                    progress)


def _removed(bucket: Bucket, contents: _Contents, keys: Collection[str], progress: Progress) -> BucketPruned:
    for done, key in enumerate(sorted(keys)):
        progress(done, len(keys))
        _reading(bucket, partial(bucket.delete, key))
    progress(len(keys), len(keys))
    removed_bytes = sum(contents.payloads[key].nbytes for key in keys)
    total = sum(one.nbytes for one in contents.payloads.values())
    return BucketPruned(len(keys), removed_bytes, len(contents.payloads) - len(keys), total - removed_bytes)


def _contents(bucket: Bucket) -> _Contents:
    segments = {one.key: one for one in bucket.objects(f"{ROOT}ledger/")}
    rows: dict[str, LedgerRows] = {}
    damaged = []
    for key in sorted(segments):
        parsed = rows_of_segment(bucket.read_all(key))
        if parsed is None:
            damaged.append(key)
        else:
            rows[key] = parsed
    return _Contents(rows, segments, tuple(damaged),
                     {one.key: one for one in bucket.objects(f"{ROOT}records/")})


def _totals(bucket: Bucket, namespace: str, rows: LedgerRows) -> ModelTotals:
    """Several writers may name one payload: its bytes count once."""
    kv = rows["kind"] == KV
    _, first = np.unique(rows["checksum"], return_index=True)
    facts: dict[str, Any] = {}
    try:
        facts = json.loads(bucket.read_all(f"{ROOT}namespaces/{namespace}.json"))
    except (OSError, ValueError):
        facts = {}
    return ModelTotals(
        namespace, str(facts.get("model", "unknown")), int((rows["kind"] == CHECKPOINT).sum()), int(kv.sum()),
        int(rows["tokens"][kv].sum()), int(rows["payload_bytes"][first].sum()),
        int((rows["salt"] != np.void(bytes(16))).sum()), int((rows["flags"] & INEXACT != 0).sum()), 0, facts)


def _reading(bucket: Bucket, call: Callable[[], T]) -> T:
    try:
        return call()
    except OSError as error:
        said = bucket.last_error or reason_of(error)
        raise ConfigError(f"--store {bucket.location}: {said}", param=PARAM) from None

