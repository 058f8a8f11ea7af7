"""What a directory holds, and whether every byte of it is right: ``weft store info`` and ``verify``.

    directory --ledger--> live rows --> totals by model
                                    --> each payload read, each checksum and chain compared

Both open the directory for reading, so they work beside a server. A server that evicts meanwhile reuses
blocks; ``verify`` therefore reads the ledger again before it calls a record damaged.

Rejected: totals by file (a volume has records of every model).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.store.disk import OsDisk
from weft.store.extents import BLOCK_BYTES
from weft.store.identity import NAMESPACES_FOLDER
from weft.store.opening import LOCK_FILE, OpenDirectory, open_directory, read_ledger
from weft.store.recovery import LiveRows
from weft.store.rows import CHECKPOINT, INEXACT, KV, chain_of, payload_checksum, root_chain


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """What one namespace has. ``facts``: its JSON, empty if the file is missing."""

    namespace: str
    model: str
    checkpoints: int
    kv_records: int
    tokens: int
    payload_bytes: int
    salted: int
    inexact: int
    restores: int
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoreSurvey:
    """``holder``: the process that writes to the directory now, empty if there is none."""

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
    """``damaged``: (number, reason) of each record that is wrong."""

    records: int = 0
    payload_bytes: int = 0
    damaged: list[tuple[int, str]] = field(default_factory=list)
    dropped_rows: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not self.damaged and not self.dropped_rows


def survey(path: Path, disk: OsDisk | None = None) -> StoreSurvey:
    """Raises ConfigError for a path that is no store."""
    opened = open_directory(path, disk or OsDisk(), write=False)
    try:
        return _survey(opened)
    finally:
        opened.close()


def verify(path: Path, progress: Callable[[int, int], None], disk: OsDisk | None = None) -> VerifyResult:
    """Reads every payload. ``progress``: (records done, records). Raises ConfigError."""
    opened = open_directory(path, disk or OsDisk(), write=False)
    try:
        result = VerifyResult(dropped_rows=dict(opened.live.dropped) if opened.live is not None else {})
        if opened.live is None or opened.ledger is None:
            return result
        suspects = _suspects(opened, opened.live, result, progress)
        if suspects:
            _, now = read_ledger(path, opened.disk, opened.volume_blocks, writable=False)
            numbers = set(now.rows["number"].tolist()) if now is not None else set()
            result.damaged = [suspect for suspect in suspects if suspect[0] in numbers]
        return result
    finally:
        opened.close()


def _suspects(opened: OpenDirectory, live: LiveRows, result: VerifyResult,
              progress: Callable[[int, int], None]) -> list[tuple[int, str]]:
    assert opened.ledger is not None
    suspects: list[tuple[int, str]] = []
    chains: list[int] = []
    for done, (row, parent) in enumerate(zip(live.rows, live.parents.tolist(), strict=True)):
        progress(done, len(live.rows))
        chain = chains[parent] if parent >= 0 else \
            root_chain(row["namespace"].tobytes(), row["salt"].tobytes())
        reason = ""
        try:
            if row["kind"] == KV:
                chain = chain_of(chain, opened.ledger.read_tokens(int(row["tokens_at"]), int(row["tokens"])))
            payload = memoryview(bytearray(int(row["payload_bytes"])))
            if len(payload):
                opened.volumes.read(int(row["volume"]), int(row["offset"]) // BLOCK_BYTES, payload)
            if payload_checksum(payload) != row["checksum"].tobytes():
                reason = "checksum"
            elif chain != int(row["chain"]):
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
    if live is not None:
        for namespace in np.unique(live.rows["namespace"]):
            mask = live.rows["namespace"] == namespace
            models.append(_totals(opened, live.rows[mask], live.uses[mask], namespace.tobytes().hex()))
    payloads = live.rows["payload_bytes"] if live is not None else np.zeros(0, dtype=np.uint64)
    used = int(((payloads + np.uint64(BLOCK_BYTES - 1)) // np.uint64(BLOCK_BYTES)).sum()) * BLOCK_BYTES
    return StoreSurvey(
        str(opened.path), tuple(sorted(models, key=lambda one: -one.payload_bytes)),
        len(opened.volume_blocks), sum(opened.volume_blocks.values()) * BLOCK_BYTES, used,
        ledger.row_count - 1 if ledger is not None else 0, ledger.generation if ledger is not None else 0,
        dict(live.dropped) if live is not None else {}, _holder(opened), tuple(opened.notes))


def _totals(opened: OpenDirectory, rows: Any, uses: Any, namespace: str) -> ModelTotals:
    facts = _facts(opened, namespace)
    kv = rows["kind"] == KV
    return ModelTotals(
        namespace, str(facts.get("model", "unknown")), int((rows["kind"] == CHECKPOINT).sum()),
        int(kv.sum()), int(rows["tokens"][kv].sum()), int(rows["payload_bytes"].sum()),
        int((rows["salt"] != np.void(bytes(16))).sum()), int((rows["flags"] & INEXACT != 0).sum()),
        int(uses.sum()), facts)


def _facts(opened: OpenDirectory, namespace: str) -> dict[str, Any]:
    try:
        facts = json.loads(opened.disk.read_file(opened.path / NAMESPACES_FOLDER / f"{namespace}.json"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _holder(opened: OpenDirectory) -> str:
    """The process in the lock file, if it holds the lock."""
    disk, path = opened.disk, opened.path / LOCK_FILE
    try:
        with disk.reading(path) as handle:
            free = disk.lock(handle)
        return "" if free else disk.read_file(path).decode("utf-8", "replace").strip()
    except OSError:
        return ""
