"""The names of adapters: which there are, and how operators change that while the server runs.

    model: "name"  --model_for-->  the served model with that adapter        every dialect, batches too
    GET  /v1/models                 the model's names, then the adapters, each with its base as ``parent``
    POST /v1/load_lora_adapter      {"lora_name", "lora_path"}: read here, tried by every engine, then known
    POST /v1/unload_lora_adapter    {"lora_name"}: unknown from now on; running answers end with it

A name is bound to the sha256 of files. Other files under the same name, or the same path, are another
adapter: requests that are running end with the first one, later ones begin with the second and find nothing
of the first in any cache. Paths and the answers in vLLM's words, which clients know
(``entrypoints/serve/lora``).

The list of names lives in the process that answers HTTP. With several of them a change would reach one alone,
so it is refused there, and ``--lora`` is the way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft.adapters import Adapter, check_name, read_adapter
from weft.errors import ConfigError, RequestError
from weft.server.protocol import read_body
from weft.server.sse import read_raw

if TYPE_CHECKING:
    from weft.server.service import ServedModel, Service


class LoadAdapterBody(msgspec.Struct, frozen=True):
    """``load_inplace``: other files may take a name that is in use."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterBody(msgspec.Struct, frozen=True):
    """``lora_int_id``: of vLLM's clients; unread."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterHandlers:
    """Operations of ``openapi.endpoints``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()

    async def load_lora_adapter(self, request: Request) -> Response:
        body = await read_body(await read_raw(request), LoadAdapterBody)
        model = self._open()
        name, names = body.lora_name, self._service.adapters
        try:
            check_name(name, flag="lora_name")
        except ConfigError as error:
            raise RequestError(error.message, param="lora_name") from None
        if name in model.names:
            raise RequestError(f"lora_name {name} is a name of the model itself; choose another",
                               param="lora_name")
        async with self._turn:   # two loads of one name must not cross
            adapter = await asyncio.to_thread(self._read, name, body.lora_path)
            known = names.find(name)
            if known is not None and known.digest != adapter.digest and body.load_inplace is False:
                raise RequestError(f"the adapter {name} is there already, with other files; load_inplace "
                                   "true replaces it", param="lora_name")
            await self._service.engine.engines.load_adapter(adapter)
            names.bind(adapter)
        if known is not None and known.digest not in names.digests():
            await self._service.engine.engines.unload_adapter(known.digest)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        body = await read_body(await read_raw(request), UnloadAdapterBody)
        self._open()
        async with self._turn:
            adapter = self._service.adapters.release(body.lora_name)
        if adapter.digest not in self._service.adapters.digests():
            await self._service.engine.engines.unload_adapter(adapter.digest)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.")

    def _open(self) -> ServedModel:
        """Raises EngineUnavailableError, RequestError."""
        if self._service.workers is not None:
            raise RequestError("adapters are loaded at the start (--lora) where --http-workers is above 1: a "
                               "change of names would reach one of the processes alone", param="lora_name")
        return self._service.model_for(None)

    def _read(self, name: str, path: str) -> Adapter:
        """In a thread: it reads both files."""
        from weft.models.hub import resolve_adapter

        return read_adapter(name, resolve_adapter(path))


def adapter_card(model: ServedModel, adapter: Adapter) -> dict[str, Any]:
    """As an entry of /v1/models."""
    return {"id": adapter.name, "object": "model", "created": model.created_s, "owned_by": "weft",
            "root": adapter.name, "parent": model.name, "max_model_len": model.info.sizes.max_model_len,
            "vocab_size": model.info.vocab_size}
