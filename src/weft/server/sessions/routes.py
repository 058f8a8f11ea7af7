"""``/v1/sessions``: save, show, restore, fork and delete the sessions of the request's API key.

save, restore    the engine computes tokens that no cache has (a request without an answer), then pins the prefix fork
a second name for the same tokens: nothing is computed, no page is taken delete, expiry   the name is removed; from then
on its pages and records are evicted like any other
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.adapters import salted
from weft.engine.stats import NamedPrefix, PinState
from weft.errors import RequestError, WeftError
from weft.objects.conversations import check_pictures, conversation_content, conversation_of, known_prefix
from weft.objects.sessions import (
    Content,
    StoredSession,
    UnknownSessionError,
    check_identity,
    check_name,
    decoded,
    forked_session,
    new_session,
    tokens_of,
)
from weft.request import SamplingParams
from weft.server.chat import chat_conversation
from weft.server.generation import Generation
from weft.server.models import HostedModel
from weft.server.protocol import ChatBody, Int, Salt, read_body
from weft.server.responses.items import messages_of
from weft.server.responses.turns import read_history
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sessions.continuing import identity_of, session_store
from weft.server.sessions.store import SessionStore
from weft.server.sse import Page, json_response, owner_of, page_of, read_raw, salt_of, unless_gone
from weft.tasks import end_tasks
from weft.text.chat import ChatMessage
from weft.text.prompt import KnownPrefix, Prompt

SWEEP_EVERY_S = 5.0
_log = logging.getLogger("weft.server")


class SessionBody(msgspec.Struct, kw_only=True):
    """The body of a save. Exactly one of ``messages``, ``response_id`` and ``prompt`` gives the tokens of the session.
    ``expires_after``: seconds."""

    name: str
    model: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_id: str | None = None
    prompt: str | list[Int] | None = None
    cache_salt: Salt | None = None
    expires_after: float | None = None


class ForkBody(msgspec.Struct, kw_only=True):
    name: str
    expires_after: float | None = None


class SessionObject(msgspec.Struct, kw_only=True):
    """A session as the API shows it. ``tokens``: its length; ``computed_tokens``: tokens that this request had to
    compute. ``stored``: whether the state is in the store of an engine; ``in_memory``: tokens up to the deepest state
    in memory. The last three are null if the engines were not asked."""

    id: str
    object: str = "session"
    name: str
    model: str
    parent: str | None
    created_at: int
    expires_at: int
    tokens: int
    bytes: int
    computed_tokens: int | None = None
    in_memory: int | None = None
    stored: bool | None = None
    messages: list[Any] | None = None
    token_ids: list[int] | None = None


class SessionList(Page[SessionObject], kw_only=True):
    """The sessions of a key, the oldest first."""


class DeletedSession(msgspec.Struct, kw_only=True):
    id: str
    object: str = "session"
    name: str
    deleted: bool


class Sessions:
    """Saves and restores of sessions, for all endpoints; a ``Background`` that removes expired sessions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None

    @property
    def store(self) -> SessionStore:
        return session_store(self._service)

    def start(self) -> None:
        if self._service.sessions is not None:
            self._task = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)

    async def save(
        self,
        request: Request,
        name: str,
        model: ServedModel,
        content: Content,
        *,
        salt: str,
        expires_after: float | None,
    ) -> SessionObject:
        """Save a session. Raise RequestError, SessionLimitError, and the engine's refusal of the tokens."""
        owner, store = owner_of(request), self.store
        session = new_session(
            content,
            name=name,
            owner=owner,
            model=model.base,
            requested=None if model.name == model.base else model.name,
            salt=salt,
            engine_salt=salted(model.adapter, salt),
            identity=identity_of(self._service, model),
            now_s=store.table.clock(),
            age_s=store.table.limits.age(expires_after),
        )
        await store.check_room(name, owner, len(session.tokens) + len(session.messages))
        before = await self._before(name, owner)
        try:
            computed, states = await self._bring(request, model, session)
            session = msgspec.structs.replace(session, nbytes=max((state.nbytes for state in states), default=0))
            await store.put(session, owner)
        except BaseException:
            await self._pin_as(session, before)
            raise
        self._service.metrics.count(model.base, "session_saves")
        return shown(session, states, computed)

    async def restore(self, request: Request, name: str) -> SessionObject:
        """Bring the state of a session into memory. Raise UnknownSessionError, SessionConflictError."""
        session = await self.store.get(name, owner_of(request))
        model = await self._model_of(session)
        computed, states = await self._bring(request, model, session)
        self._service.metrics.count(model.base, "session_restores")
        return shown(session, states, computed)

    async def fork(self, request: Request, name: str, into: str, expires_after: float | None) -> SessionObject:
        """Copy a session under the name ``into``. Raise UnknownSessionError, SessionConflictError,
        SessionLimitError."""
        owner, store = owner_of(request), self.store
        session = await store.get(name, owner)
        await self._model_of(session)
        table = store.table
        age_s = table.limits.age(expires_after)
        forked = forked_session(session, into, owner=owner, now_s=table.clock(), age_s=age_s)
        await store.put(forked, owner)
        return shown(forked, await self._pin(forked, waits=False), 0)

    async def delete(self, name: str, owner: str) -> str:
        """Delete a session, and return its id. Raise UnknownSessionError."""
        key = await self.store.delete(name, owner)
        await self._unpin([key])
        return key

    async def named(self, model: HostedModel) -> Sequence[NamedPrefix]:
        """Return the prefixes that an engine of ``model`` pins when it starts."""
        if self._service.sessions is None:
            return ()
        try:
            listed = await self._service.sessions.listed()
        except WeftError as error:
            _log.warning("sessions are not pinned: %s", error.message)
            return ()
        return [
            named_prefix(session) for session in listed if model.served is None or session.model == model.served.base
        ]

    async def _model_of(self, session: StoredSession) -> ServedModel:
        model = await self._service.model_for(session.requested or session.model)
        check_identity(session, model.base, identity_of(self._service, model))
        return model

    async def _before(self, name: str, owner: str) -> StoredSession | None:
        try:
            return await self.store.get(name, owner)
        except WeftError:
            return None

    async def _pin_as(self, failed: StoredSession, before: StoredSession | None) -> None:
        """Undo the pin of ``failed``, which could not be saved: pin ``before`` again, if there was one."""
        with contextlib.suppress(WeftError):
            if before is None:
                await self._unpin([failed.session_id])
            else:
                await self._pin(before, waits=False)

    async def _bring(self, request: Request, model: ServedModel, session: StoredSession) -> tuple[int, list[PinState]]:
        """Bring the state of ``session`` into an engine's memory, and pin it. Return the tokens that were computed for
        it, and the states of the engines. A prompt never resumes at its own end, so a state in the store is restored by
        a prompt with one more token."""
        states, count = await self._pin(session), session.token_count
        if any(state.tokens == count for state in states):
            return 0, states
        prompt, computed = await _prompt_of(session, model), 0
        if any(state.is_stored for state in states) and count < model.info.sizes.max_model_len:
            longer = msgspec.structs.replace(prompt, tokens=[*prompt.tokens, prompt.tokens[-1]])
            computed = await self._compute(request, model, session, longer) - 1
            states = await self._pin(session)
        if not any(state.tokens == count for state in states):
            computed = await self._compute(request, model, session, prompt)
            states = await self._pin(session)
        return computed, states

    async def _compute(self, request: Request, model: ServedModel, session: StoredSession, prompt: Prompt) -> int:
        """Return how many tokens of ``prompt`` an engine computed."""
        sampling = SamplingParams(max_tokens=0, temperature=0.0)
        generation = Generation(self._service, model, [prompt], [sampling], priority=0, cache_salt=session.salt)
        try:
            await unless_gone(generation.start(), request.receive)
            await generation.whole()
        finally:
            generation.close()
        return len(prompt.tokens) - generation.cached_tokens()

    async def _pin(self, session: StoredSession, *, waits: bool = True) -> list[PinState]:
        fleet = self._service.fleet_of(session.model)
        return (await fleet.engines.pin([named_prefix(session)], waits=waits))[session.session_id]

    async def _unpin(self, keys: Sequence[str]) -> None:
        for _, fleet in self._service.models.fleets:
            with contextlib.suppress(WeftError):  # an engine that is away pins the stored sessions when it is back
                await fleet.engines.unpin(keys)

    async def _sweep(self) -> None:
        while True:
            try:
                gone = await self.store.sweep()
                if gone:
                    await self._unpin(gone)
            except WeftError as error:
                _log.warning("expired sessions stay: %s", error.message)
            await asyncio.sleep(SWEEP_EVERY_S)


def named_prefix(session: StoredSession) -> NamedPrefix:
    return NamedPrefix(session.session_id, session.engine_salt, session.compared)


async def _prompt_of(session: StoredSession, model: ServedModel) -> Prompt:
    """Return the tokens of ``session`` with its pictures, which are read again. Raise RequestError if they cannot be
    read, SessionConflictError if they have changed."""
    if not session.keys:
        return Prompt(tokens_of(session))
    _, prompt = await model.renderer.render(conversation_of(session))
    check_pictures(session, prompt)
    return Prompt(prompt.tokens, pictures=prompt.pictures)


def shown(session: StoredSession, states: Sequence[PinState] = (), computed: int | None = None) -> SessionObject:
    return SessionObject(
        id=session.session_id,
        name=session.name,
        model=session.requested or session.model,
        parent=session.parent,
        created_at=int(session.created_s),
        expires_at=int(session.expires_s),
        tokens=session.token_count,
        bytes=session.nbytes,
        computed_tokens=computed,
        in_memory=max((state.tokens for state in states), default=None),
        stored=any(state.is_stored for state in states) if states else None,
    )


class SessionHandlers:
    """The endpoints of sessions. A public method is an operation of ``openapi.endpoints``."""

    def __init__(self, service: Service, sessions: Sessions) -> None:
        self._service, self._sessions = service, sessions

    async def save_session(self, request: Request) -> Response:
        self._service.check_open()
        body = await read_body(await read_raw(request), SessionBody, unserved={})
        check_name(body.name)
        model = await self._service.model_for(body.model)
        return json_response(
            await self._sessions.save(
                request,
                body.name,
                model,
                await self._content(request, body, model),
                salt=salt_of(request, body.cache_salt) or "",
                expires_after=body.expires_after,
            )
        )

    async def list_sessions(self, request: Request) -> Response:
        listed = [shown(session) for session in await self._sessions.store.listed(owner_of(request))]
        return json_response(page_of(listed, request, lambda session: str(session.id)))

    async def retrieve_session(self, request: Request) -> Response:
        session = await self._sessions.store.get(request.path_params["name"], owner_of(request))
        answer = shown(session)
        answer.messages = decoded(session.messages) if session.messages else None
        answer.token_ids = tokens_of(session)
        return json_response(answer)

    async def restore_session(self, request: Request) -> Response:
        self._service.check_open()
        return json_response(await self._sessions.restore(request, request.path_params["name"]))

    async def fork_session(self, request: Request) -> Response:
        self._service.check_open()
        body = await read_body(await read_raw(request), ForkBody, unserved={})
        name = request.path_params["name"]
        return json_response(await self._sessions.fork(request, name, body.name, body.expires_after))

    async def delete_session(self, request: Request) -> Response:
        name = request.path_params["name"]
        key = await self._sessions.delete(name, owner_of(request))
        return json_response(DeletedSession(id=key, name=name, deleted=True))

    async def _content(self, request: Request, body: SessionBody, model: ServedModel) -> Content:
        """Return the content of a new session. Raise RequestError, UnknownResponseError."""
        fields = [field for field in ("messages", "response_id", "prompt") if getattr(body, field) is not None]
        if len(fields) != 1:
            raise RequestError(
                f"{' and '.join(fields) or 'none of messages, response_id and prompt'} given; a session is saved from "
                "one of messages, response_id and prompt",
                param=fields[-1] if fields else "messages",
            )
        if body.messages is not None:
            return await self._of_messages(request, body, model)
        if body.response_id is not None:
            return await self._of_response(request, body, model)
        assert body.prompt is not None
        if isinstance(body.prompt, str):
            await model.renderer.check_text(body.prompt, param="prompt")
            return Content(tokens=await model.renderer.encode(body.prompt, add_special_tokens=True))
        model.check_ids(body.prompt, param="prompt")
        return Content(tokens=list(body.prompt))

    async def _of_messages(self, request: Request, body: SessionBody, model: ServedModel) -> Content:
        assert body.messages is not None
        chat = ChatBody(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=False,
        )
        known = await self._known(request, body.name, model)
        _, prompt = await model.renderer.render(chat_conversation(chat), known=known)
        return conversation_content(prompt, body.messages, body.tools, body.chat_template_kwargs)

    async def _known(self, request: Request, name: str, model: ServedModel) -> KnownPrefix | None:
        """Return the tokens that the session had before: a longer session continues them."""
        try:
            session = await self._sessions.store.get(name, owner_of(request))
            check_identity(session, model.base, identity_of(self._service, model))
        except WeftError:
            return None
        return known_prefix(session)

    async def _of_response(self, request: Request, body: SessionBody, model: ServedModel) -> Content:
        assert body.response_id is not None
        responses = self._service.responses
        if responses is None:
            raise UnknownSessionError("this server stores no responses", param="response_id")
        path = await responses.path_to(body.response_id, owner_of(request))
        history = read_history(path, model.vocabulary)
        said = msgspec.json.decode(path[-1].body, type=_Instructions).instructions
        messages = messages_of(history.items, said)
        if history.known is None:  # the tokenizer splits this text into other tokens than the model wrote
            return await self._of_messages(request, msgspec.structs.replace(body, messages=messages), model)
        return Content(
            tokens=history.known.tokens,
            messages=msgspec.json.encode(messages),
            chars=history.known.chars,
            digest=history.known.digest,
        )


class _Instructions(msgspec.Struct):
    instructions: str | None = None
