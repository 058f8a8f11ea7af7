"""The endpoints of files and batches, as OpenAI's clients use them.

    POST   /v1/files                 a form with ``file`` and ``purpose``
    GET    /v1/files                 newest first; ``after``, ``limit``, ``purpose``
    GET    /v1/files/ID  DELETE      GET /v1/files/ID/content
    POST   /v1/batches               input_file_id, endpoint, completion_window
    GET    /v1/batches               newest first; ``after``, ``limit``
    GET    /v1/batches/ID            POST /v1/batches/ID/cancel

Files and batches belong to the key that made them; for any other key they are a 404.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from weft.errors import NotFoundError, RequestError, WeftError
from weft.server.batches.answering import URLS, run_lines, window_of
from weft.server.batches.files import FileObject, FileStore
from weft.server.batches.lines import BadInputError, IndexedLine, OutputFile, OutputLine, read_index, unanswered_line
from weft.server.errors import WrongMediaTypeError
from weft.server.protocol import read_body
from weft.server.service import Service
from weft.server.sse import ClientGoneError, Page, json_response, owner_of, page_of, read_raw, tenant_of
from weft.server.tenants import Tenant
from weft.tasks import end_tasks
from weft.text.current_request import API_KEY

PURPOSES = ("batch", "batch_output")


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/classify",
        "/pooling",
    ]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class DeletedFile(msgspec.Struct):
    id: str
    object: str
    deleted: bool


class FileList(Page[FileObject], kw_only=True):
    """The files of a key, the newest first."""


class FileStoreOffError(RequestError):
    """The server keeps no files."""

    status = 404
    kind = "not_found_error"


WINDOW_S = 24 * 3600
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_log = logging.getLogger("weft.server")


class UnknownBatchError(NotFoundError):
    """The API key has no batch with that id."""


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


class BatchList(Page[BatchObject], kw_only=True):
    """The batches of a key, the newest first."""


class BatchRecord(msgspec.Struct, kw_only=True):
    owner: str
    batch: BatchObject


class BatchRunner:
    """The batches of one server. ``tenant_of`` finds the API key of an owner; ``keys``: whether clients need a key."""

    def __init__(
        self,
        service: Service,
        files: FileStore,
        *,
        lines_max: int,
        age_s: float,
        keys: bool,
        tenant_of: Callable[[str], Tenant | None],
    ) -> None:
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
        self._current: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """The batch that is being computed and its task, by owner; each API key has one at a time."""

    def start(self) -> None:
        """Continue unfinished batches, once the model is ready."""
        self._task = asyncio.create_task(self._run_all())

    async def stop(self) -> None:
        """Stop the runs; the next server computes them again."""
        if self._task is not None:
            await end_tasks(self._task)

    def create(self, owner: str, *, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> BatchObject:
        """Create a batch. Raise UnknownFileError."""
        self._drop_old()
        self._files.get(input_file_id, owner)
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            request_counts=RequestCounts(),
            metadata=metadata,
        )
        self._records[batch.id] = BatchRecord(owner=owner, batch=batch)
        self._save(batch)
        self._news.set()
        return batch

    def get(self, batch_id: str, owner: str) -> BatchObject:
        """Return a batch. Raise UnknownBatchError."""
        record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            raise UnknownBatchError(f"there is no batch {batch_id[:100]!r}", param="batch_id", code="batch_not_found")
        return record.batch

    def listed(self, owner: str) -> list[BatchObject]:
        """Return the batches of an owner, newest first."""
        return [record.batch for record in reversed(self._records.values()) if record.owner == owner]

    def cancel(self, batch_id: str, owner: str) -> BatchObject:
        """Cancel a batch. Raise UnknownBatchError; RequestError for a batch that has ended."""
        batch = self.get(batch_id, owner)
        if batch.status not in _UNFINISHED:
            raise RequestError(f"{batch_id!r} has ended: it is {batch.status}", param="batch_id", code="batch_ended")
        if batch.status != "cancelling":
            self._set(batch, "cancelling")
        current = self._current.get(owner)
        if current is not None and current[0] == batch_id:
            current[1].cancel()
        self._news.set()
        return batch

    # ------------------------------------------------------------------ computing

    async def _run_all(self) -> None:
        try:
            while self._service.models.death is None:  # a server with an engine goes on
                self._news.clear()
                for record in self._records.values():
                    if record.batch.status in _UNFINISHED and record.owner not in self._current:
                        self._begin(record)
                await self._news.wait()
        finally:  # the server stops
            await end_tasks(*(work for _, work in self._current.values()))

    def _begin(self, record: BatchRecord) -> None:
        def end(work: asyncio.Task[None]) -> None:
            del self._current[record.owner]
            self._news.set()
            if work.cancelled() or (error := work.exception()) is None or self._service.models.death is not None:
                return
            _log.error("%s failed", record.batch.id, exc_info=error)
            self._fail(record.batch, [(0, "internal_error", "the server failed on this batch")])

        work = asyncio.create_task(self._run(record))
        self._current[record.owner] = record.batch.id, work
        work.add_done_callback(end)

    async def _run(self, record: BatchRecord) -> None:
        batch = record.batch
        API_KEY.set(record.owner)
        try:
            source = self._files.path(batch.input_file_id, record.owner)
            index = await asyncio.to_thread(
                read_index, source, urls=(batch.endpoint,), lines_max=self._lines_max, param="input_file_id"
            )
            tenant = self._tenant_of(record.owner)
            # No owner: the client needed no key, for example because only operators have keys.
            if tenant is None and (record.owner or self._keys):
                raise RequestError(
                    "the API key of this batch is not one of the server's any more", code="invalid_api_key"
                )
        except BadInputError as error:
            return self._fail(batch, error.complaints)
        except WeftError as error:
            return self._fail(batch, [(0, error.code or "invalid_input", error.message)])
        known = {line.custom_id for line in index}
        with (
            contextlib.closing(OutputFile(self._part(batch, "output"), known)) as output,
            contextlib.closing(OutputFile(self._part(batch, "errors"), known)) as errors,
        ):
            done = output.done | errors.done
            batch.request_counts = RequestCounts(total=len(index), completed=len(output.done), failed=len(errors.done))
            missing = [line for line in index if line.custom_id not in done]
            missing = await self._compute(batch, source, missing, output, errors, tenant)
            reason = "batch_cancelled" if batch.status == "cancelling" else "batch_expired"
            for line in missing:
                errors.write(unanswered_line(line, reason, "the batch ended before this line was computed"))
        self._finish(record, expired=bool(missing) and batch.status != "cancelling")

    async def _compute(
        self,
        batch: BatchObject,
        source: Path,
        lines: list[IndexedLine],
        output: OutputFile,
        errors: OutputFile,
        tenant: Tenant | None,
    ) -> list[IndexedLine]:
        """Compute the lines. Return the lines without an answer: their batch was cancelled, or its time is over."""
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
        """Return the id of the file that a part file becomes; None for an empty one."""
        part = self._part(record.batch, kind)
        if not part.exists() or not part.stat().st_size:
            return None
        with part.open("rb") as source:
            return self._files.add(
                record.owner, f"{record.batch.id}_{kind}.jsonl", "batch_output", source, bounded=False
            ).id

    def _fail(self, batch: BatchObject, complaints: list[tuple[int, str, str]]) -> None:
        batch.errors = {
            "object": "list",
            "data": [
                {"code": code, "line": line or None, "message": message, "param": None}
                for line, code, message in complaints
            ],
        }
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


class BatchHandlers:
    def __init__(self, files: FileStore | None, runner: BatchRunner | None) -> None:
        self._files_or_none = files
        self._runner_or_none = runner

    async def upload_file(self, request: Request) -> Response:
        files = self._files
        if request.headers.get("content-type", "").partition(";")[0].strip() != "multipart/form-data":
            raise WrongMediaTypeError(
                "a file is sent as a form (multipart/form-data) with file and purpose", param="Content-Type"
            )
        _admit(request)
        try:
            async with request.form(max_files=1, max_fields=16) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise RequestError(
                        "file is missing: the form has no file of that name",
                        param="file",
                        code="missing_required_parameter",
                    )
                if purpose != "batch":
                    raise RequestError(f"purpose is {str(purpose)[:50]!r}; this server takes 'batch'", param="purpose")
                stored = await asyncio.to_thread(
                    files.add, owner_of(request), file.filename or "upload", "batch", file.file
                )
        except ClientDisconnect:
            raise ClientGoneError from None
        return json_response(stored)

    async def list_files(self, request: Request) -> Response:
        listed = self._files.listed(owner_of(request))
        purpose = request.query_params.get("purpose")
        if purpose is not None and purpose not in PURPOSES:
            raise RequestError(f"purpose is {purpose[:50]!r}; it is {' or '.join(PURPOSES)}", param="purpose")
        chosen = [file for file in listed if purpose in (None, file.purpose)]
        return json_response(page_of(chosen, request, _id_of))

    async def retrieve_file(self, request: Request) -> Response:
        return json_response(self._files.get(request.path_params["file_id"], owner_of(request)))

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        self._files.delete(file_id, owner_of(request))
        return json_response(DeletedFile(file_id, "file", True))

    async def file_content(self, request: Request) -> Response:
        path = self._files.path(request.path_params["file_id"], owner_of(request))
        return FileResponse(path, media_type="application/octet-stream")

    async def create_batch(self, request: Request) -> Response:
        runner = self._runner
        body = await read_body(await read_raw(request), BatchBody, unserved={})
        assert body.endpoint in URLS
        return json_response(
            runner.create(
                owner_of(request), endpoint=body.endpoint, input_file_id=body.input_file_id, metadata=body.metadata
            )
        )

    async def list_batches(self, request: Request) -> Response:
        return json_response(page_of(self._runner.listed(owner_of(request)), request, _id_of))

    async def retrieve_batch(self, request: Request) -> Response:
        return json_response(self._runner.get(request.path_params["batch_id"], owner_of(request)))

    async def cancel_batch(self, request: Request) -> Response:
        return json_response(self._runner.cancel(request.path_params["batch_id"], owner_of(request)))

    @property
    def _files(self) -> FileStore:
        if self._files_or_none is None:
            raise FileStoreOffError(
                "this server keeps no files (server.file_store off)", param="server.file_store", code="file_store_off"
            )
        return self._files_or_none

    @property
    def _runner(self) -> BatchRunner:
        assert self._files is not None
        assert self._runner_or_none is not None
        return self._runner_or_none


def _id_of(item: FileObject | BatchObject) -> str:
    return item.id


def _admit(request: Request) -> None:
    """Count an upload for its key by its declared size."""
    tenant = tenant_of(request)
    if tenant is not None:
        length = request.headers.get("content-length", "0")
        size = int(length) if length.isdigit() else 0
        request.scope["state"]["body_bytes"] = size  # released by the gate
        refusal = tenant.admit(size)
        if refusal is not None:
            raise refusal
