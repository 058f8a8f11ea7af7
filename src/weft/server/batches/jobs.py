"""Batches on a server: one at a time, oldest first, below all interactive requests.

    created --> validating --> in_progress --> finalizing --> completed
                    |               |
                  failed     cancelling --> cancelled          expired (24 h after its creation)

A batch is a record on disk (``FileStore``), written at each change of its status. Answers go to two part
files as they come, one for answers of status 200 and one for errors. At the end each becomes a file of the
key that made the batch. A server that starts goes on with every unfinished batch: the part files say which
lines are done.

A batch computes under its key: namespace of the cache, quotas of tokens. If the key is no longer one of the
server's, the batch fails.

Laws: L11 (limits.max_batch_lines; batches are removed with the age of files).

Rejected: several batches at once (each would have half the cache, and end at the time of the last).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import RequestError, UserError, WeftError
from weft.server.batches.answering import run_lines, window_of
from weft.server.batches.files import FileStore
from weft.server.batches.lines import (
    BadInputError,
    IndexedLine,
    OutputFile,
    OutputLine,
    read_index,
    unanswered_line,
)
from weft.server.service import Service
from weft.server.tenants import Tenant

WINDOW_S = 24 * 3600
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_log = logging.getLogger("weft.server")


class UnknownBatchError(UserError):
    """No batch of this key has that id."""

    status = 404
    kind = "not_found_error"


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch as the API shows it."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    owner: str
    batch: BatchObject


class BatchRunner:
    """``tenant_of`` finds the key of an owner; ``keys``: the server has any."""

    def __init__(self, service: Service, files: FileStore, *, lines_max: int, age_s: float, keys: bool,
                 tenant_of: Callable[[str], Tenant | None]) -> None:
        self._service = service
        self._files = files
        self._lines_max = lines_max
        self._age_s = age_s
        self._keys = keys
        self._tenant_of = tenant_of
        self._records: dict[str, BatchRecord] = {}
        for body in files.batches():
            record = msgspec.json.decode(body, type=BatchRecord)
            self._records[record.batch.id] = record
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._current: tuple[str, asyncio.Task[None]] | None = None

    def start(self) -> None:
        """The model is ready: unfinished batches go on."""
        self._task = asyncio.create_task(self._run_all())

    async def stop(self) -> None:
        """What runs is computed again by the next server."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def create(self, owner: str, *, endpoint: str, input_file_id: str,
               metadata: dict[str, str] | None) -> BatchObject:
        """Raises UnknownFileError."""
        self._drop_old()
        self._files.get(input_file_id, owner)
        now = int(time.time())
        batch = BatchObject(id=f"batch_{uuid.uuid4().hex}", endpoint=endpoint, input_file_id=input_file_id,
                            created_at=now, expires_at=now + WINDOW_S, request_counts=RequestCounts(),
                            metadata=metadata)
        self._records[batch.id] = BatchRecord(owner=owner, batch=batch)
        self._save(batch)
        self._news.set()
        return batch

    def get(self, batch_id: str, owner: str) -> BatchObject:
        """Raises UnknownBatchError."""
        record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            raise UnknownBatchError(f"there is no batch {batch_id[:100]!r}", param="batch_id",
                                    code="batch_not_found")
        return record.batch

    def listed(self, owner: str) -> list[BatchObject]:
        """The newest first."""
        return [record.batch for record in reversed(self._records.values()) if record.owner == owner]

    def cancel(self, batch_id: str, owner: str) -> BatchObject:
        """Raises UnknownBatchError; RequestError for a batch that has ended."""
        batch = self.get(batch_id, owner)
        if batch.status not in _UNFINISHED:
            raise RequestError(f"{batch_id!r} has ended: it is {batch.status}", param="batch_id",
                               code="batch_ended")
        if batch.status != "cancelling":
            self._set(batch, "cancelling")
        if self._current is not None and self._current[0] == batch_id:
            self._current[1].cancel()
        self._news.set()
        return batch

    # ------------------------------------------------------------------ the work

    async def _run_all(self) -> None:
        while True:
            self._news.clear()
            waiting = [record for record in self._records.values() if record.batch.status in _UNFINISHED]
            if not waiting:
                await self._news.wait()
                continue
            record = waiting[0]
            work = asyncio.create_task(self._run(record))
            self._current = record.batch.id, work
            try:
                await asyncio.wait((work,))
            finally:
                self._current = None
                if not work.done():  # the server stops
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
            if work.cancelled():
                continue
            if (error := work.exception()) is not None:
                if self._service.engine.death is not None:
                    return  # a server with an engine goes on
                _log.error("%s failed", record.batch.id, exc_info=error)
                self._fail(record.batch, [(0, "internal_error", "the server failed on this batch")])

    async def _run(self, record: BatchRecord) -> None:
        batch = record.batch
        try:
            source = self._files.path(batch.input_file_id, record.owner)
            index = await asyncio.to_thread(read_index, source, urls=(batch.endpoint,),
                                            lines_max=self._lines_max, param="input_file_id")
            tenant = self._tenant_of(record.owner)
            if tenant is None and self._keys:
                raise RequestError("the API key of this batch is not one of the server's any more",
                                   code="invalid_api_key")
        except BadInputError as error:
            return self._fail(batch, error.complaints)
        except WeftError as error:
            return self._fail(batch, [(0, error.code or "invalid_input", error.message)])
        known = {line.custom_id for line in index}
        with (contextlib.closing(OutputFile(self._part(batch, "output"), known)) as output,
              contextlib.closing(OutputFile(self._part(batch, "errors"), known)) as errors):
            done = output.done | errors.done
            batch.request_counts = RequestCounts(total=len(index), completed=len(output.done),
                                                 failed=len(errors.done))
            missing = [line for line in index if line.custom_id not in done]
            missing = await self._compute(batch, source, missing, output, errors, tenant)
            reason = "batch_cancelled" if batch.status == "cancelling" else "batch_expired"
            for line in missing:
                errors.write(unanswered_line(line, reason, "the batch ended before this line was computed"))
        self._finish(record, expired=bool(missing) and batch.status != "cancelling")

    async def _compute(self, batch: BatchObject, source: Path, lines: list[IndexedLine], output: OutputFile,
                       errors: OutputFile, tenant: Tenant | None) -> list[IndexedLine]:
        """Returns the lines without an answer: the batch is cancelled, or its time is over."""
        missing = {line.custom_id: line for line in lines}
        if batch.status == "validating":
            self._set(batch, "in_progress")

        def write(line: OutputLine) -> None:
            (output if line.succeeded else errors).write(line)
            del missing[line.custom_id]
            counts = batch.request_counts
            counts.completed += line.succeeded
            counts.failed += not line.succeeded

        if lines and batch.status == "in_progress":
            window = min(window_of(self._service), 256)
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(max(batch.expires_at - time.time(), 0)):
                        await run_lines(self._service, source, lines, write, window=window, tenant=tenant)
                except asyncio.CancelledError:
                    if batch.status != "cancelling":
                        raise  # the server stops
        return list(missing.values())

    def _finish(self, record: BatchRecord, *, expired: bool) -> None:
        batch = record.batch
        was_cancelled = batch.status == "cancelling"
        batch.finalizing_at = int(time.time())
        batch.output_file_id = self._result(record, "output")
        batch.error_file_id = self._result(record, "errors")
        self._set(batch, "cancelled" if was_cancelled else "expired" if expired else "completed")
        for kind in ("output", "errors"):
            self._part(batch, kind).unlink(missing_ok=True)

    def _result(self, record: BatchRecord, kind: str) -> str | None:
        """The id of the file that a part file becomes; None for an empty one."""
        part = self._part(record.batch, kind)
        if not part.exists() or not part.stat().st_size:
            return None
        with part.open("rb") as source:
            return self._files.add(record.owner, f"{record.batch.id}_{kind}.jsonl", "batch_output", source,
                                   bounded=False).id

    def _fail(self, batch: BatchObject, complaints: list[tuple[int, str, str]]) -> None:
        batch.errors = {"object": "list", "data": [
            {"code": code, "line": line or None, "message": message, "param": None}
            for line, code, message in complaints]}
        self._set(batch, "failed")

    def _set(self, batch: BatchObject, status: str) -> None:
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        self._save(batch)

    def _save(self, batch: BatchObject) -> None:
        record = self._records[batch.id]
        self._files.save_batch(batch.id, record.owner, msgspec.json.encode(record))

    def _part(self, batch: BatchObject, kind: str) -> Path:
        return self._files.root / f"{batch.id}.{kind}.part"

    def _drop_old(self) -> None:
        for record in list(self._records.values()):
            batch = record.batch
            if batch.status not in _UNFINISHED and batch.created_at + self._age_s <= time.time():
                del self._records[batch.id]
                self._files.drop_batch(batch.id, record.owner)
