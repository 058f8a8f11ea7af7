"""The endpoints of Responses.

    POST   /v1/responses                    an answer, whole or as a stream
    POST   /v1/responses/input_tokens       the length of a prompt
    GET    /v1/responses/ID                 a stored response
    DELETE /v1/responses/ID
    POST   /v1/responses/ID/cancel          always refused: nothing runs in the background
    GET    /v1/responses/ID/input_items     the items of its own request, newest first

A response belongs to the API key that made it; any other key gets a 404.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.errors import RequestError, WeftError
from weft.server.exchange import Handler, answer_job, json_response, namespace_of, read_raw, tenant_of
from weft.server.protocol import read_body
from weft.server.responses.answers import Keep, ResponsesJob
from weft.server.responses.database import UnknownResponseError
from weft.server.responses.history import Keeper, RawAnswer, TurnHistory, read_history
from weft.server.responses.items import Item, read_items
from weft.server.responses.protocol import (
    ITEMS_DEFAULT,
    ITEMS_MAX,
    UNSERVED_IN_RESPONSES,
    ResponsesBody,
    check_fields,
)
from weft.server.responses.store import ResponseStore
from weft.server.responses.truncation import prepare_response
from weft.server.responses.turns import conversation, in_own_words
from weft.server.service import Service
from weft.server.turn import PreparedTurn

_log = logging.getLogger("weft.server")
_SMALL_BYTES = 64 << 10
"""A response of less text than this is hashed and packed on the event loop, in some tens of microseconds."""


def response_handlers(service: Service) -> dict[str, Handler]:
    """By operation of ``weft.server.openapi.endpoints``."""
    handlers = ResponseHandlers(service)
    return {"create_response": handlers.create, "response_input_tokens": handlers.input_tokens,
            "retrieve_response": handlers.retrieve, "delete_response": handlers.delete,
            "cancel_response": handlers.cancel, "response_input_items": handlers.input_items}


class ResponseHandlers:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._body(request)
        items = read_items(body.input)
        history = await self._history(request, body)
        try:
            turn = await prepare_response(self._service, body, [*history.items, *items], history.known)
        except RequestError as error:
            raise in_own_words(error) from error
        job = ResponsesJob(turn, body, keep=self._keep(request, body, turn, items, history))
        return await answer_job(request, job, stream=bool(body.stream),
                                keep_alive_s=self._service.config.sse_keep_alive)

    async def input_tokens(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._body(request)
        model = self._service.model_for(body.model)
        history = await self._history(request, body)
        fields = conversation(body, [*history.items, *read_items(body.input)])
        _, prompt = await model.write_chat(fields, with_places=False)
        await model.check_text(prompt.text, param="input")
        encoded = await model.encode_chat(prompt, add_special_tokens=False, known=history.known)
        return json_response({"object": "response.input_tokens", "input_tokens": len(encoded.tokens)})

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise RequestError("stream is not supported: only a response in the background can be streamed "
                               "again", param="stream", code="unsupported_parameter")
        stored = await self._store().get(request.path_params["response_id"], _owner(request))
        return Response(stored.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._store().delete(response_id, _owner(request))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._store().get(response_id, _owner(request))
        raise RequestError(f"{response_id!r} cannot be cancelled: only a response in the background can, and "
                           "this server makes none there", param="response_id", code="not_cancellable")

    async def input_items(self, request: Request) -> Response:
        stored = await self._store().get(request.path_params["response_id"], _owner(request))
        items: list[Item] = msgspec.json.decode(stored.items)
        return json_response(_page(items, request))

    async def _body(self, request: Request) -> ResponsesBody:
        body = await read_body(await read_raw(request), ResponsesBody, unserved=UNSERVED_IN_RESPONSES)
        check_fields(body)
        body.cache_salt = namespace_of(request, body.cache_salt)
        return body

    def _store(self) -> ResponseStore:
        store = self._service.responses
        if store is None:
            raise UnknownResponseError("this server stores no responses (--response-store off)",
                                       code="response_not_found", param="response_id")
        return store

    async def _history(self, request: Request, body: ResponsesBody) -> TurnHistory:
        if body.previous_response_id is None:
            return TurnHistory()
        path = await self._store().path_to(body.previous_response_id, _owner(request))
        return read_history(path, self._service.model_for(body.model).vocabulary)

    def _keep(self, request: Request, body: ResponsesBody, turn: PreparedTurn, items: list[Item],
              history: TurnHistory) -> Keep | None:
        """What stores the response; None if it is not to be stored. Raises RequestError."""
        store = self._service.responses
        if store is None and body.store:
            raise RequestError("store is not supported: this server stores no responses "
                               "(--response-store off)", param="store", code="unsupported_parameter")
        if store is None or body.store is False:
            return None
        keeper = Keeper(turn.model, turn.prompt, items, history.tokens)
        owner, parent = _owner(request), body.previous_response_id

        async def keep(response_id: str, response: bytes, answer: RawAnswer) -> bool:
            is_small = len(response) + len(turn.prompt.text or "") < _SMALL_BYTES
            try:
                return await store.put(lambda: keeper.record(response_id, parent, response, answer), owner,
                                       is_small=is_small)
            except WeftError as error:
                _log.warning("a response was not stored: %s", error.message)
                return False

        return keep


def _owner(request: Request) -> str:
    """All requests to a server without keys have one owner."""
    tenant = tenant_of(request)
    return "" if tenant is None else tenant.owner


def _page(items: list[Item], request: Request) -> dict[str, Any]:
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {order[:20]!r}; it is asc or desc", param="order")
    limit = _limit(query.get("limit"))
    listed = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise RequestError(f"after is {after[:100]!r}, which is no item of this response", param="after")
        listed = listed[ids.index(after) + 1:]
    page = listed[:limit]
    return {"object": "list", "data": page, "has_more": len(listed) > limit,
            "first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}


def _limit(given: str | None) -> int:
    if given is None:
        return ITEMS_DEFAULT
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    if not 1 <= limit <= ITEMS_MAX:
        raise RequestError(f"limit is {given[:20]!r}; it must be at least 1 and at most {ITEMS_MAX}",
                           param="limit")
    return limit
