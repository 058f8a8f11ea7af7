"""The names of adapters, and their changes by operators while the server runs.

    model: "name"  --model_for-->  the served model with that adapter        every dialect, batches too
    "model/name"                    the same, of one of several models
    GET  /v1/models                 the model's names, then the adapters, each with its base as ``parent``
    POST /v1/load_lora_adapter      {"lora_name", "lora_path"}: read here, tried by every engine, then known
    POST /v1/unload_lora_adapter    {"lora_name"}: unknown from now on; running answers finish with it

A name is bound to the sha256 of files. Other files under the same name, or the same path, are another adapter: requests
that are running end with the first one, later ones begin with the second and find nothing of the first in any cache.
Paths and answers are vLLM's (``entrypoints/serve/lora``), which clients know.

The list of names belongs to the process that answers HTTP. With several processes a change would reach only one, so it
is refused there, and ``--lora`` names the adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft.adapters import Adapter, check_name, read_adapter
from weft.errors import ConfigError, RequestError, UserError
from weft.fleet.all_engines import AllEngines
from weft.server.protocol import read_body
from weft.server.sse import read_raw

if TYPE_CHECKING:
    from weft.server.service import Service

_log = logging.getLogger("weft.server")


class LoadAdapterBody(msgspec.Struct, frozen=True):
    """The body of a load. ``load_inplace``: whether other files may take a name that is in use."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(msgspec.Struct, frozen=True):
    """The body of an unload. ``lora_int_id``: sent by vLLM's clients; not used."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterHandlers:
    """Operations of ``openapi.endpoints`` on adapters."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()

    async def load_lora_adapter(self, request: Request) -> Response:
        body = await read_body(await read_raw(request), LoadAdapterBody)
        async with self._engines(body.lora_name) as engines:
            return await self._load(body, engines)

    async def _load(self, body: LoadAdapterBody, engines: AllEngines) -> Response:
        name, names = body.lora_name, self._service.models.adapters
        try:
            check_name(name, flag="lora_name")
        except ConfigError as error:
            raise RequestError(error.message, param="lora_name") from None
        if name in self._service.models.names():
            raise RequestError(f"lora_name {name} is a name of the model itself; choose another", param="lora_name")
        if name in self._service.names.all():
            raise RequestError(
                f"lora_name {name} is a created name (/api/create); choose another, or delete it", param="lora_name"
            )
        async with self._turn:  # two loads of one name must not interleave
            adapter = await asyncio.to_thread(self._read, name, body.lora_path)
            known = names.find(name)
            if known is not None and known.digest != adapter.digest and body.load_inplace is False:
                raise RequestError(
                    f"the adapter {name} is loaded already, from other files; load_inplace true replaces it",
                    param="lora_name",
                )
            await engines.load_adapter(adapter)
            names.bind(adapter)
        if known is not None and known.digest not in names.digests():
            await engines.unload_adapter(known.digest)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        body = await read_body(await read_raw(request), UnloadAdapterBody)
        async with self._engines(body.lora_name) as engines:
            async with self._turn:
                adapter = self._service.models.adapters.release(body.lora_name)
            if adapter.digest not in self._service.models.adapters.digests():
                await engines.unload_adapter(adapter.digest)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.")

    @contextlib.asynccontextmanager
    async def _engines(self, name: str) -> AsyncGenerator[AllEngines]:
        """Yield the engines of the model that the adapter belongs to. A server of several models loads the model and
        keeps it loaded meanwhile. Raise EngineUnavailableError, RequestError."""
        if self._service.workers is not None:
            raise RequestError(
                "adapters are loaded at the start (--lora) where --http-workers is above 1: a change of "
                "names would reach only one of the processes",
                param="lora_name",
            )
        self._service.check_open()
        base = self._service.models.owner_of(name)
        if base is None:
            raise RequestError(
                f"lora_name is {name[:200]!r}; with several models it is MODEL/NAME, and the "
                f"models are {', '.join(self._service.models.names())}",
                param="lora_name",
            )
        use = await base.enter()
        try:
            yield use.fleet.engines
        finally:
            use.end()

    def _read(self, name: str, path: str) -> Adapter:
        """Read both files of an adapter, in a thread. Raise RequestError; CheckpointError, with the reason, if only
        operators may load: to other clients the reason would tell which files exist."""
        from weft.models.hub import resolve_adapter

        try:
            return read_adapter(name, resolve_adapter(path))
        except UserError as error:
            if self._service.config.operator_key:
                raise
            _log.warning("lora_path %s: %s", path[:1000], error.message)
            raise RequestError(
                f"lora_path {path[:200]!r} is not an adapter that this server can read; its log has the "
                "reason, and with "
                "--operator-key the answer",
                param="lora_path",
            ) from None
