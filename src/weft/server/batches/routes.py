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
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from weft.errors import RequestError
from weft.server.batches.answering import URLS
from weft.server.batches.files import FileObject, FileStore
from weft.server.batches.jobs import BatchObject, BatchRunner
from weft.server.errors import WrongMediaTypeError
from weft.server.protocol import read_body
from weft.server.sse import ClientGoneError, Handler, json_response, read_raw, tenant_of

PAGE_DEFAULT, PAGE_MAX = 20, 100
PURPOSES = ("batch", "batch_output")


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class DeletedFile(msgspec.Struct):
    id: str
    object: str
    deleted: bool


class FileList(msgspec.Struct, kw_only=True):
    object: str
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class BatchList(msgspec.Struct, kw_only=True):
    object: str
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FileStoreOffError(RequestError):
    """The server keeps no files."""

    status = 404
    kind = "not_found_error"


def batch_handlers(files: FileStore | None, runner: BatchRunner | None) -> dict[str, Handler]:
    """By operation of ``weft.server.openapi.endpoints``. None: the store is off."""
    handlers = BatchHandlers(files, runner)
    names = ("upload_file", "list_files", "retrieve_file", "delete_file", "file_content", "create_batch",
             "list_batches", "retrieve_batch", "cancel_batch")
    return {name: getattr(handlers, name) for name in names}


class BatchHandlers:
    def __init__(self, files: FileStore | None, runner: BatchRunner | None) -> None:
        self._files_or_none = files
        self._runner_or_none = runner

    async def upload_file(self, request: Request) -> Response:
        files = self._files
        if request.headers.get("content-type", "").partition(";")[0].strip() != "multipart/form-data":
            raise WrongMediaTypeError("a file is sent as a form (multipart/form-data) with file and purpose",
                                      param="Content-Type")
        _admit(request)
        try:
            async with request.form(max_files=1, max_fields=16) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    raise RequestError("file is missing: the form has no file of that name", param="file",
                                       code="missing_required_parameter")
                if purpose != "batch":
                    raise RequestError(f"purpose is {str(purpose)[:50]!r}; this server takes 'batch'",
                                       param="purpose")
                stored = await asyncio.to_thread(files.add, _owner(request), file.filename or "upload",
                                                 "batch", file.file)
        except ClientDisconnect:
            raise ClientGoneError from None
        return json_response(stored)

    async def list_files(self, request: Request) -> Response:
        listed = self._files.listed(_owner(request))
        purpose = request.query_params.get("purpose")
        if purpose is not None and purpose not in PURPOSES:
            raise RequestError(f"purpose is {purpose[:50]!r}; it is {' or '.join(PURPOSES)}", param="purpose")
        return json_response(_page([one for one in listed if purpose in (None, one.purpose)], request))

    async def retrieve_file(self, request: Request) -> Response:
        return json_response(self._files.get(request.path_params["file_id"], _owner(request)))

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        self._files.delete(file_id, _owner(request))
        return json_response(DeletedFile(file_id, "file", True))

    async def file_content(self, request: Request) -> Response:
        path = self._files.path(request.path_params["file_id"], _owner(request))
        return FileResponse(path, media_type="application/octet-stream")

    async def create_batch(self, request: Request) -> Response:
        runner = self._runner
        body = await read_body(await read_raw(request), BatchBody, unserved={})
        assert body.endpoint in URLS
        return json_response(runner.create(_owner(request), endpoint=body.endpoint,
                                           input_file_id=body.input_file_id, metadata=body.metadata))

    async def list_batches(self, request: Request) -> Response:
        return json_response(_page(self._runner.listed(_owner(request)), request))

    async def retrieve_batch(self, request: Request) -> Response:
        return json_response(self._runner.get(request.path_params["batch_id"], _owner(request)))

    async def cancel_batch(self, request: Request) -> Response:
        return json_response(self._runner.cancel(request.path_params["batch_id"], _owner(request)))

    @property
    def _files(self) -> FileStore:
        if self._files_or_none is None:
            raise FileStoreOffError("this server keeps no files (--file-store off)", param="--file-store",
                                    code="file_store_off")
        return self._files_or_none

    @property
    def _runner(self) -> BatchRunner:
        assert self._files is not None
        assert self._runner_or_none is not None
        return self._runner_or_none


def _admit(request: Request) -> None:
    """Counts an upload for its key by its declared size."""
    tenant = tenant_of(request)
    if tenant is not None:
        length = request.headers.get("content-length", "0")
        size = int(length) if length.isdigit() else 0
        request.scope["state"]["body_bytes"] = size  # released by the gate
        refusal = tenant.admit(size)
        if refusal is not None:
            raise refusal


def _owner(request: Request) -> str:
    tenant = tenant_of(request)
    return "" if tenant is None else tenant.owner


def _page(listed: Sequence[FileObject] | Sequence[BatchObject], request: Request) -> dict[str, Any]:
    query = request.query_params
    given = query.get("limit", str(PAGE_DEFAULT))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    if not 1 <= limit <= PAGE_MAX:
        raise RequestError(f"limit is {given[:20]!r}; it must be at least 1 and at most {PAGE_MAX}",
                           param="limit")
    after = query.get("after")
    if after is not None:
        ids = [one.id for one in listed]
        if after not in ids:
            raise RequestError(f"after is {after[:100]!r}, which is none of the listed ids", param="after")
        listed = listed[ids.index(after) + 1:]
    page = listed[:limit]
    return {"object": "list", "data": page, "has_more": len(listed) > limit,
            "first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
