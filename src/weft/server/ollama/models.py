"""Ollama's endpoints that change names and models: create, copy, delete, pull, blobs.

    create, copy    a name for a model that is served (``names``); weights are never copied
    blobs, create   uploaded GGUF files --``models.blobs``--> a model on disk, as if it had been pulled
    pull            hub --``models.pulling``, in a thread--> the directory of models, with lines of progress; a name
                    that is served and not on disk is there already
    delete          a created name; else a model on disk that no process has loaded

Answers are lines of JSON, the last of which says success. With --pulled the server serves a new model on disk before
that line is sent. Without it the next ``weft serve NAME`` does, and a line says so. A client that disconnects ends its
pull, and the next pull resumes. These are operators' paths (``gate``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from weft.errors import QueueFullError, RequestError, UnknownModelError, WeftError
from weft.request import SamplingParams
from weft.server.errors import bug
from weft.server.models import ANY_NAME, unknown_model
from weft.server.ollama import protocol
from weft.server.presets import Preset, PresetStore, check_preset_name
from weft.server.protocol import read_body
from weft.server.service import Service
from weft.server.sse import JSON_LINES, ClientGoneError, EventStream, json_response, read_raw, unless_gone
from weft.text.chat import ChatMessage

if TYPE_CHECKING:
    from weft.models.pulling import PullProgress

PULLS_MAX = 2
"""Most pulls at once in one HTTP process: each has its own threads and connections (law L11)."""
UPLOADS_MAX = 4
"""Most uploads at once in one HTTP process."""
_PIECE_BYTES = 1 << 20
"""Bytes of a piece of an upload, which a thread hashes and writes."""
_LOOK_S = 0.1
"""Seconds between two lines of progress of a pull, at least."""
_DONE = {"status": "success"}
_HUBS = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
"""Prefixes that Ollama's clients put before hub names."""


class OllamaModelHandlers:
    """Operations of ``openapi.endpoints`` on Ollama's names and models."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pulls = self._uploads = 0

    async def ollama_create(self, request: Request) -> Response:
        raw = await read_raw(request, undeclared=True)
        body = await read_body(raw, protocol.OllamaCreateBody, unserved=protocol.UNSERVED_IN_CREATE)
        self._service.check_open()
        lines = await self._from_file(body) if body.files else []
        if not body.files or body.has_beginning:
            preset = await self._created(body)
            await asyncio.to_thread(self._store.put, preset)
            lines.append({"status": f"using {preset.model}"})
        return _answer([*lines, _DONE], whole=body.stream is False)

    async def ollama_has_blob(self, request: Request) -> Response:
        from weft.models.blobs import blob, read_digest

        uploaded = blob(read_digest(request.path_params["digest"], param="digest"))
        return Response(status_code=404 if uploaded is None else 200)

    async def ollama_upload_blob(self, request: Request) -> Response:
        from weft.models.blobs import Upload, blob, read_digest

        digest = read_digest(request.path_params["digest"], param="digest")
        if self._uploads >= UPLOADS_MAX:
            raise QueueFullError(
                f"{self._uploads} files are being uploaded, which is the limit; try again when one is complete",
                param="digest",
                code="queue_full",
            )
        self._uploads += 1
        try:
            if await asyncio.to_thread(blob, digest) is not None:
                async for _ in _pieces(
                    request
                ):  # read to the end: a client that did not check first reads the answer only then
                    pass
                return Response(status_code=200)
            upload = await asyncio.to_thread(Upload, digest, self._service.config.blob_bytes())
            try:
                upload.check_size(int(request.headers.get("content-length", 0)))
                async for piece in _pieces(request):
                    await asyncio.to_thread(upload.write, piece)
                await asyncio.to_thread(upload.finish)
            finally:
                await asyncio.to_thread(upload.close)
        finally:
            self._uploads -= 1
        return Response(status_code=201)

    async def _from_file(self, body: protocol.OllamaCreateBody) -> list[dict[str, Any]]:
        """Make a model on disk of the files that ``body`` names; with --pulled, serve it. Return lines for the answer.
        Raise RequestError, CheckpointError, ModelInUseError.

        If ``body`` has a system prompt or parameters, the weights are called NAME:gguf, and ``body`` then refers to
        that name."""
        from weft.models.blobs import FILES_MAX, PROJECTOR, create_model, read_digest

        name = self._free_name(_named(body.model or body.name), param="model", may_be_pulled=not body.has_beginning)
        files = body.files or {}
        if body.from_ or len(files) > FILES_MAX:
            raise RequestError(
                f"files names the GGUF file of a model, or up to {FILES_MAX} that are its parts, and then there is no "
                "from",
                param="files",
            )
        if body.has_beginning:
            if not self._service.models.serves_pulled or ":" in name:
                raise RequestError(
                    f"{name} is to begin with a system prompt, parameters, a template or messages: that needs a server "
                    "with --pulled and a name without a tag. Without these fields the file becomes a model on disk",
                    param="files",
                    code="unsupported_parameter",
                )
            name = body.from_ = f"{name}:gguf"
        digests = {file: read_digest(text, param="files") for file, text in files.items()}
        model = await asyncio.to_thread(create_model, name, digests)
        lines = [{"status": f"{name} is on disk"}]
        if any(file.path == PROJECTOR for file in model.manifest.files):
            lines.append({"status": "the projector is kept but not read: the model takes only text"})
        return [*lines, *await self._serve_pulled(name)]

    async def _serve_pulled(self, name: str) -> list[dict[str, Any]]:
        """Serve new models on disk, with --pulled. Return a line for the answer if ``name`` is not served."""
        await self._service.models.look()
        if self._service.models.has(name):
            return []
        why = self._service.models.unserved.get(name) or f"`weft serve {name}` serves it"
        return [{"status": f"on disk; {why}"}]

    async def ollama_copy(self, request: Request) -> Response:
        body = await read_body(await read_raw(request, undeclared=True), protocol.OllamaCopyBody)
        self._service.check_open()
        name = self._free_name(body.destination, param="destination")
        copied = self._beginning(body.source, param="source")
        await asyncio.to_thread(self._store.put, msgspec.structs.replace(copied, name=name, created_s=time.time()))
        return json_response(_DONE)

    async def ollama_delete(self, request: Request) -> Response:
        body = await read_body(await read_raw(request, undeclared=True), protocol.OllamaDeleteBody)
        name = _named(body.model or body.name)
        models = self._service.models
        if self._service.models.has(name) and not models.forgets(name):
            raise RequestError(
                f"{name} is a model that this server serves: end the server, then `weft rm {name}` removes a "
                "pulled one from this machine. One that is in memory with --pulled is unloaded first, with keep_alive "
                "0. An adapter goes with /v1/unload_lora_adapter",
                param="model",
                code="model_in_use",
            )
        store = self._service.names.store
        if store is None or not await asyncio.to_thread(store.remove, name):
            await asyncio.to_thread(_remove_from_disk, name)
            await models.look()
        return json_response(_DONE)

    async def ollama_pull(self, request: Request) -> Response:
        body = await read_body(await read_raw(request, undeclared=True), protocol.OllamaPullBody)
        name = _named(body.model or body.name)
        for hub in _HUBS:
            name = name.removeprefix(hub)
        if await asyncio.to_thread(self._needs_no_pull, name):
            return _answer([_DONE], whole=body.stream is False)
        if self._pulls >= PULLS_MAX:
            raise QueueFullError(
                f"{self._pulls} models are being pulled, which is the limit; try again when one is complete",
                param="model",
                code="queue_full",
            )
        pull = _Pull(name, serve=self._serve_pulled, on_end=self._pull_ended)
        self._pulls += 1
        if body.stream is not False:
            return EventStream(pull.lines(), on_end=pull.close, media_type=JSON_LINES)
        try:
            await unless_gone(pull.whole(), request.receive)
        finally:
            pull.close()
        return json_response(_DONE)

    def _needs_no_pull(self, name: str) -> bool:
        """Return whether requests for ``name`` are answered and no hub has a newer state of it: clients pull a name
        that the list of models does not show."""
        from weft.models.local import find

        own, preset = self._service.names.meant(name, self._service.models.has)
        return (preset is not None or self._service.models.has(own)) and find(name) is None

    def _pull_ended(self) -> None:
        self._pulls -= 1

    @property
    def _store(self) -> PresetStore:
        """The store of names. Raise RequestError where names are off."""
        if (store := self._service.names.store) is None:
            raise RequestError(
                "this server keeps no created names (server.name_store off)",
                param="server.name_store",
                code="unsupported_parameter",
            )
        return store

    def _free_name(self, name: str, *, param: str, may_be_pulled: bool = False) -> str:
        """Return ``name`` if it may be created. Raise RequestError for an invalid name and for the name of a model or
        adapter of this server. ``may_be_pulled``: allow a name that is served only because it is on disk."""
        name = check_preset_name(protocol.served_name(name), param=param)
        is_free = may_be_pulled and self._service.models.forgets(name)
        if self._service.models.has(name) and not is_free:
            raise RequestError(
                f"{param} is {name!r}, which is a model of this server by itself; choose another name", param=param
            )
        return name

    def _beginning(self, source: str, *, param: str) -> Preset:
        """Return the first settings of a name made from ``source``. Raise RequestError, UnknownModelError."""
        requested = protocol.served_name(source)
        own, preset = self._service.names.meant(requested, self._service.models.has)
        if preset is not None:
            return preset
        if own not in (listed := [model.name for model in self._service.listed()]) and own != ANY_NAME:
            from weft.models.local import find

            place = (
                f". {requested} is on this machine's disk: `weft serve {requested}` serves it"
                if find(requested) is not None
                else ""
            )
            error = unknown_model(requested, listed)
            raise UnknownModelError(f"{error.message}{place}", param=param)
        return Preset(name="", model=self._service.own_name(own), created_s=0.0)

    async def _created(self, body: protocol.OllamaCreateBody) -> Preset:
        """Return the name that ``body`` creates. Raise RequestError that names the field."""
        name = self._free_name(_named(body.model or body.name), param="model")
        if not body.from_:
            raise RequestError(
                "from is missing: a served model, or a created name", param="from", code="missing_required_parameter"
            )
        before = self._beginning(body.from_, param="from")
        system, messages = _messages(body)
        preset = msgspec.structs.replace(
            before,
            name=name,
            created_s=time.time(),
            system=before.system if system is None else system,
            template=before.template if body.template is None else body.template,
            parameters={**before.parameters, **_parameters(body.parameters)},
            messages=before.messages if messages is None else messages,
            license=before.license if body.license is None else _texts(body.license),
        )
        side = await self._service.text_side(preset.model)
        SamplingParams(**preset.defaults).check(side.info.vocab_size)
        await self._service.under(preset, side)  # compiles the template, to find errors
        return preset


def _named(name: str | None) -> str:
    """Return the name in the body. Raise RequestError if it is missing."""
    if not name:
        raise RequestError("model is missing", param="model", code="missing_required_parameter")
    return protocol.served_name(name)


def _parameters(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the parameters, checked, and report those without effect as ignored. Raise RequestError for a value of
    another type."""
    parameters = {name: value for name, value in (parameters or {}).items() if value is not None}
    options = msgspec.structs.asdict(protocol.read_options(parameters, prefix="parameters"))
    return {name: value for name, value in options.items() if value is not None}


def _messages(body: protocol.OllamaCreateBody) -> tuple[str | None, list[ChatMessage] | None]:
    """Return the system prompt, which may be the first message, and the other messages. Raise RequestError."""
    if body.messages is None:
        return body.system, None
    system, messages = body.system, list(body.messages)
    if messages and messages[0].role == "system" and not system:
        system = messages.pop(0).content
    begin = len(body.messages) - len(messages)
    return system, [_first_message(index, message) for index, message in enumerate(messages, begin)]


def _first_message(index: int, message: protocol.OllamaMessage) -> ChatMessage:
    if message.role not in ("user", "assistant"):
        raise RequestError(
            f"messages[{index}].role is {message.role[:50]!r}; a name begins with one system prompt, then "
            "messages of user and assistant",
            param=f"messages[{index}].role",
        )
    for field in ("images", "tool_calls", "thinking"):
        if getattr(message, field):
            raise RequestError(
                f"messages[{index}].{field} is not supported: a name begins with texts",
                param=f"messages[{index}].{field}",
                code="unsupported_parameter",
            )
    return ChatMessage(role=message.role, content=message.content)


def _texts(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in pieces of a mebibyte. Raise ClientGoneError."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size >= _PIECE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
    except ClientDisconnect:
        raise ClientGoneError from None
    yield b"".join(parts)


def _remove_from_disk(name: str) -> None:
    """Remove a model from the disk. Raise UnknownModelError, ModelInUseError."""
    from weft.models.local import find, remove

    if find(name) is None:
        raise UnknownModelError(f"there is no created name {name[:200]!r}, and no pulled model", param="model")
    remove(name)


def _answer(lines: list[dict[str, Any]], *, whole: bool) -> Response:
    if whole:
        return json_response(lines[-1])
    return Response(b"".join(msgspec.json.encode(line) + b"\n" for line in lines), media_type=JSON_LINES)


class _Pull:
    """One pull, in its own thread. After ``close`` the thread ends when the hub next sends something. ``on_end``:
    called once, when no thread runs any more."""

    def __init__(
        self, name: str, *, serve: Callable[[str], Awaitable[list[dict[str, Any]]]], on_end: Callable[[], None]
    ) -> None:
        self._name, self._serve, self._on_end = name, serve, on_end
        self._came: dict[str, PullProgress] = {}
        self._gone = threading.Event()
        self._has_begun = False

    def close(self) -> None:
        """End the pull: the client has the complete answer, or has disconnected."""
        self._gone.set()
        if not self._has_begun:
            self._on_end()

    async def whole(self) -> None:
        """Wait for the end of the pull. Raise as ``pull``."""
        async for _ in self._progress():
            pass
        await self._serve(self._name)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        try:
            yield _line({"status": "pulling manifest"})
            async for now in self._progress():
                digest = now.file.digest
                yield _line(
                    {
                        "status": f"{now.verb} {Path(now.file.path).name}",
                        "digest": digest,
                        "total": now.file.size,
                        "completed": now.file_bytes,
                    }
                )
            for line in await self._serve(self._name):
                yield _line(line)
            yield _line(_DONE)
        except WeftError as error:
            yield protocol.error_line(error) + b"\n"
        except Exception as error:
            yield protocol.error_line(bug(error)) + b"\n"
            raise

    async def _progress(self) -> AsyncGenerator[PullProgress, None]:
        """Yield the progress of each file that changed since the last check."""
        from weft.models.pulling import pull  # imports the hub's client

        shown: dict[str, PullProgress] = {}
        self._has_begun = True
        work = asyncio.ensure_future(
            asyncio.to_thread(pull, self._name, on_progress=self._note, cancelled=self._gone.is_set)
        )
        work.add_done_callback(self._ended)
        is_done = False
        while not is_done:
            is_done = bool((await asyncio.wait((work,), timeout=_LOOK_S))[0])
            for path, now in list(self._came.items()):
                if shown.get(path) != now:
                    shown[path] = now
                    yield now
        await work

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._on_end()
        if not work.cancelled():
            work.exception()  # read it: asyncio logs an exception that is never read

    def _note(self, now: PullProgress) -> None:
        """Note the progress; called in several threads."""
        self._came[now.file.path] = now


def _line(status: dict[str, Any]) -> bytes:
    return msgspec.json.encode(status) + b"\n"
