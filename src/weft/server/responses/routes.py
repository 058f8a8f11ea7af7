"""The endpoints of Responses.

    POST   /v1/responses                    an answer, complete or as a stream
    POST   /v1/responses/input_tokens       the length of a prompt
    GET    /v1/responses/ID                 a stored response
    DELETE /v1/responses/ID
    POST   /v1/responses/ID/cancel          ends a response that is computed in the background
    GET    /v1/responses/ID/input_items     the items of its own request, newest first

A response belongs to the API key that made it; any other key gets a 404.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from weft.errors import ContextLengthError, RequestError, WeftError
from weft.server.chat_turn import PreparedTurn
from weft.server.protocol import read_body
from weft.server.responses.answers import Keep, ResponsesJob, overflow_lines
from weft.server.responses.background import UNFINISHED, ResponseRuns, status_of
from weft.server.responses.items import (
    UNSERVED_IN_RESPONSES,
    Item,
    ResponsesBody,
    check_fields,
    is_reference,
    new_response_id,
    read_items,
    with_items,
)
from weft.server.responses.store import ResponseStore, StoredResponse, UnknownResponseError
from weft.server.responses.turns import (
    Keeper,
    RawAnswer,
    TurnHistory,
    conversation,
    in_own_words,
    prepare_response,
    read_apart,
    read_history,
)
from weft.server.service import Service
from weft.server.sse import (
    EventStream,
    Handler,
    answer_job,
    json_response,
    lines_of,
    owner_of,
    page_of,
    prepared,
    read_raw,
    salt_of,
    tenant_of,
    unless_gone,
)

_log = logging.getLogger("weft.server")


class ResponseHandlers:
    """The endpoints of Responses. A public method is an operation of ``openapi.endpoints``. ``forward``: sends a
    request to the process that computes responses in the background, if that is another one."""

    def __init__(self, service: Service, forward: Handler | None) -> None:
        self._service = service
        self._forward = forward

    async def create_response(self, request: Request) -> Response:
        self._service.check_open()
        raw = await read_raw(request)
        body = await self._body(request, raw)
        if body.background and self._forward is not None:
            return await self._forward(_with_raw(request, raw))
        history, response_id = await self._history(request, body), new_response_id()
        items = await self._items(request, body, history, response_id)
        try:
            preparing = prepare_response(self._service, body, [*history.items, *items], history.known)
            turn = await unless_gone(preparing, request.receive)
        except RequestError as error:
            said = in_own_words(error)
            if isinstance(said, ContextLengthError) and body.stream and not body.background:
                return self._followed(overflow_lines(body, response_id, said))
            raise said from error
        job = ResponsesJob(turn, body, response_id, keep=self._keep(request, body, turn, items, history))
        if body.background:
            return await self._begin(request, body, job, items)
        return await answer_job(
            request, prepared(job), stream=bool(body.stream), keep_alive_s=self._service.config.sse_keep_alive
        )

    async def response_input_tokens(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._body(request, await read_raw(request))
        model = await self._service.model_for(body.model)
        history = await self._history(request, body)
        items = await self._items(request, body, history, new_response_id())
        whole = [*history.items, *items]
        fields = await read_apart(len(whole), conversation, body, whole)
        _, prompt = await model.renderer.render(fields, field="input", known=history.known)
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})

    async def retrieve_response(self, request: Request) -> Response:
        response_id, owner = request.path_params["response_id"], owner_of(request)
        is_streamed = _flag(request, "stream")
        starting_after = _starting_after(request)
        run = self._runs().get(response_id, owner)
        if run is not None and is_streamed and run.has_events:
            return self._followed(run.follow(starting_after))
        if run is not None and not run.has_ended and not is_streamed:
            return Response(run.answer.body_so_far(), media_type="application/json")
        stored = await self._store().get(response_id, owner)
        if self._forward is not None and (is_streamed or status_of(stored) in UNFINISHED):
            return await self._forward(request)
        if is_streamed:
            raise RequestError(
                "stream is not supported for this response: it was not created with "
                "background and stream, or it ended long ago",
                param="stream",
                code="unsupported_parameter",
            )
        stored = await self._runs().checked(stored, owner)
        return Response(stored.body, media_type="application/json")

    async def delete_response(self, request: Request) -> Response:
        return await self._once_ended(request, self._delete)

    async def cancel_response(self, request: Request) -> Response:
        return await self._once_ended(request, self._cancel)

    async def _once_ended(self, request: Request, answer: Callable[[str, str], Awaitable[Response]]) -> Response:
        """End the response in the process that computes it. ``answer`` gets id and owner."""
        response_id, owner = request.path_params["response_id"], owner_of(request)
        stored = await self._store().get(response_id, owner)
        if self._forward is not None and status_of(stored) in UNFINISHED:
            return await self._forward(request)
        run = self._runs().get(response_id, owner)
        if run is not None:
            await self._runs().cancel(run)
        return await answer(response_id, owner)

    async def _delete(self, response_id: str, owner: str) -> Response:
        self._runs().forget(response_id)
        await self._store().delete(response_id, owner)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, response_id: str, owner: str) -> Response:
        stored = await self._runs().checked(await self._store().get(response_id, owner), owner)
        status = status_of(stored)
        if status != "cancelled":
            why = "another server computes it" if status in UNFINISHED else f"it is {status}"
            raise RequestError(
                f"{response_id!r} cannot be cancelled: {why}", param="response_id", code="not_cancellable"
            )
        return Response(stored.body, media_type="application/json")

    async def response_input_items(self, request: Request) -> Response:
        stored = await self._store().get(request.path_params["response_id"], owner_of(request))
        items: list[Item] = msgspec.json.decode(stored.items)
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order is {order[:20]!r}; it is asc or desc", param="order")
        listed = items if order == "asc" else items[::-1]
        return json_response(page_of(listed, request, lambda item: str(item["id"])))

    async def _begin(self, request: Request, body: ResponsesBody, job: ResponsesJob, items: list[Item]) -> Response:
        """Begin a response in the background. Raise the engine's refusal, and RequestError."""
        tenant, runs = tenant_of(request), self._runs()

        def end() -> None:
            if tenant is not None:
                tenant.spend(job.generation.usage().total_tokens)

        runs.check_room()
        await unless_gone(job.generation.start(), request.receive)
        try:
            run = await runs.begin(
                job,
                lines_of(job),
                owner_of(request),
                body.previous_response_id,
                msgspec.json.encode(items),
                has_events=bool(body.stream),
                on_end=end,
            )
        except BaseException:
            job.generation.close()
            raise
        if body.stream:
            return self._followed(run.follow(-1))
        return Response(run.answer.body_so_far(), media_type="application/json")

    def _followed(self, lines: AsyncGenerator[bytes, None]) -> Response:
        return EventStream(lines, on_end=lambda: None, keep_alive_s=self._service.config.sse_keep_alive)

    def _runs(self) -> ResponseRuns:
        self._store()
        assert self._service.response_runs is not None
        return self._service.response_runs

    async def _body(self, request: Request, raw: bytes) -> ResponsesBody:
        body = await read_body(raw, ResponsesBody, unserved=UNSERVED_IN_RESPONSES)
        check_fields(body)
        body.cache_salt = salt_of(request, body.cache_salt)
        return body

    def _store(self) -> ResponseStore:
        store = self._service.responses
        if store is None:
            raise UnknownResponseError(
                "this server stores no responses (server.response_store off)",
                code="response_not_found",
                param="response_id",
            )
        return store

    async def _history(self, request: Request, body: ResponsesBody) -> TurnHistory:
        if body.previous_response_id is None:
            return TurnHistory()
        path = await self._store().path_to(body.previous_response_id, owner_of(request))
        if any(status_of(stored) in UNFINISHED for stored in path):
            raise RequestError(
                f"{body.previous_response_id!r} is not finished, and cannot be continued yet",
                param="previous_response_id",
                code="response_not_finished",
            )
        return read_history(path, (await self._service.model_for(body.model)).vocabulary)

    async def _items(self, request: Request, body: ResponsesBody, history: TurnHistory, response_id: str) -> list[Item]:
        """Return the items of the request's own ``input``. Raise RequestError, UnknownResponseError."""
        items = body.input
        if not isinstance(items, str) and any(map(is_reference, items)):
            owner, store = owner_of(request), self._store()
            items = await with_items(items, history.items, lambda name: store.get(name, owner), store.limits)
        return await read_apart(0 if isinstance(items, str) else len(items), read_items, items, response_id)

    def _keep(
        self, request: Request, body: ResponsesBody, turn: PreparedTurn, items: list[Item], history: TurnHistory
    ) -> Keep | None:
        """Return the function that stores the response; None if it is not to be stored. Raise RequestError."""
        store = self._service.responses
        if store is None and (body.store or body.background):
            field = "store" if body.store else "background"
            raise RequestError(
                f"{field} is not supported: this server stores no responses (server.response_store off)",
                param=field,
                code="unsupported_parameter",
            )
        if body.background and body.store is False:
            raise RequestError("background needs store: the answer is read from there", param="background")
        if store is None or body.store is False:
            return None
        keeper = Keeper(turn.model, turn.prompt, items, history.tokens)
        owner, parent = owner_of(request), body.previous_response_id

        async def keep(response_id: str, response: bytes, answer: RawAnswer) -> bool:
            def make() -> StoredResponse:
                return keeper.record(response_id, parent, response, answer)

            try:
                if body.background:
                    return await store.finish(make, owner)
                return await store.put(make, owner)
            except WeftError as error:
                _log.warning("a response was not stored: %s", error.message)
                return False

        return keep


def _with_raw(request: Request, raw: bytes) -> Request:
    """Return ``request`` with ``raw`` as its body, which was already read."""

    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    return Request(request.scope, receive)


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise RequestError(f"{name} is {value[:20]!r}; it is true or false", param=name)
    return value == "true"


def _starting_after(request: Request) -> int:
    """Return the number of the last event that the client has; -1 for none."""
    value = request.query_params.get("starting_after", "-1")
    if value != "-1" and not (value.isascii() and value.isdigit() and len(value) < 10):
        raise RequestError(f"starting_after is {value[:20]!r}; it must be at least 0", param="starting_after")
    return int(value)
