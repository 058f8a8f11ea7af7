"""Sessions of a program: conversations by name, which ``session=`` of ``Engine.chat`` and other methods continues.

    save, restore    the engine computes tokens that no cache has, then pins the prefix (``weft.engine.pinning``)
    fork             a second name for the same tokens: nothing is computed, no page is taken
    delete, expiry   the name goes; pages and records are evicted like any other from then on

Names, tokens and messages are in an SQLite file (``weft.objects.sessions``), which may be the file of a server: a
program then has the server's sessions without API key. The file is opened at its first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.adapters import Adapter, salted
from weft.api.calls import Call, CallTable
from weft.api.chat import ChatWriter
from weft.api.completion import Prompt, token_ids
from weft.engine.engine import EngineCore
from weft.engine.pinning import PIN_WRITE_S, STEPS_TO_CLOSE, Pinning
from weft.engine.stats import NamedPrefix, PinState
from weft.errors import RequestError, WeftError
from weft.info import ModelInfo
from weft.objects.conversations import check_pictures, known_prefix
from weft.objects.database import Bounds, ObjectDatabase, default_path
from weft.objects.sessions import (
    DEFAULT_LIMITS,
    KIND,
    Content,
    SessionLimits,
    SessionTable,
    StoredSession,
    check_identity,
    decoded,
    forked_session,
    identity_facts,
    new_session,
    read_cipher,
    tokens_of,
)
from weft.request import PlacedPicture, Request
from weft.text.tokenizer import Tokenizer

FLAG = "sessions"
_OWNER = ""
"""Owner of the sessions of a server without API keys."""
_LOOK_S = 0.002

MakeRequest = Callable[[list[int], list[PlacedPicture], str | None], Request]
"""Function that makes a request without an answer from tokens, pictures, and the name of an adapter."""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A saved conversation. ``model``: the model or adapter of the tokens. ``created_at``, ``expires_at``: seconds
    since 1970. ``tokens``: length of the session; ``bytes``: of KV and state. ``computed_tokens``: tokens that this
    call had to compute; ``in_memory``: tokens up to the deepest state in memory; ``stored``: whether the state is in
    the store. The last three are None if the engine was not asked. ``messages`` and ``token_ids``: only from
    ``get``."""

    name: str
    model: str
    parent: str | None
    created_at: float
    expires_at: float
    tokens: int
    bytes: int
    computed_tokens: int | None = None
    in_memory: int | None = None
    stored: bool | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None


class EngineSessions:
    """The sessions of one engine. ``file``: None for the file of the user's servers."""

    def __init__(
        self,
        core: EngineCore,
        calls: CallTable,
        info: ModelInfo,
        *,
        tokenizer: Tokenizer,
        chat: ChatWriter,
        request: MakeRequest,
        adapter: Callable[[str | None], Adapter | None],
        file: str | Path | None,
        key_file: str | None,
        limits: SessionLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._core, self._calls, self._info = core, calls, info
        self._tokenizer, self._chat, self._request, self._adapter = tokenizer, chat, request, adapter
        self._pinning = Pinning(core)
        self._table = SessionTable(limits, read_cipher(key_file), clock)
        path = default_path() if file is None else Path(file).expanduser()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        bounds = {KIND: Bounds(float("inf"), float("inf"), limits.age_s)}
        self._database = ObjectDatabase(path, bounds, clock, flag=FLAG)
        self._pin_all()

    def close(self) -> None:
        self._database.close()

    # ------------------------------------------------------------------ names

    def save(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]] | None = None,
        *,
        prompt: Prompt | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        lora: str | None = None,
        expires_after: float | None = None,
    ) -> Session:
        """Save a conversation, or the tokens of ``prompt``, under ``name``, replacing an earlier session of that name.
        ``tools`` and ``template``: see ``Engine.chat``; ``lora``: the adapter that computes the state;
        ``expires_after``: seconds. Raises RequestError that names the field, and SessionLimitError."""
        self._sweep()
        content = self._content(name, messages, prompt, tools, template, lora)
        adapter = self._adapter(lora)
        session = new_session(
            content,
            name=name,
            owner=_OWNER,
            model=self._info.name,
            requested=lora,
            engine_salt=salted(adapter, ""),
            identity=self._identity(adapter),
            now_s=self._table.clock(),
            age_s=self._table.limits.age(expires_after),
        )
        self._table.check_room(self._database, name, _OWNER, len(session.tokens) + len(session.messages))
        before = self._find(name)
        try:
            computed, state = self._bring(session)
            session = msgspec.structs.replace(session, nbytes=state.nbytes)
            self._table.put(self._database, session, _OWNER)
        except BaseException:
            self._pin_as(session, before)
            raise
        return shown(session, state, computed)

    def restore(self, name: str) -> Session:
        """Bring the state of a session into memory. Raises UnknownSessionError, SessionConflictError."""
        session = self.find(name)
        computed, state = self._bring(session)
        return shown(session, state, computed)

    def fork(self, name: str, into: str, *, expires_after: float | None = None) -> Session:
        """Give the session ``name`` a second name. Raises UnknownSessionError, SessionConflictError,
        SessionLimitError."""
        self._sweep()
        session, age_s = self.find(name), self._table.limits.age(expires_after)
        forked = forked_session(session, into, owner=_OWNER, now_s=self._table.clock(), age_s=age_s)
        self._table.put(self._database, forked, _OWNER)
        return shown(forked, self._pin(forked, waits=False), 0)

    def get(self, name: str) -> Session:
        """Return a session with its messages and tokens. Raises UnknownSessionError, SessionConflictError."""
        session = self._table.get(self._database, name, _OWNER)
        messages = decoded(session.messages) if session.messages else None
        return msgspec.structs.replace(shown(session), messages=messages, token_ids=tokens_of(session))

    def delete(self, name: str) -> None:
        """Forget a name. Raises UnknownSessionError."""
        self._unpin([self._table.delete(self._database, name, _OWNER)])

    # ------------------------------------------------------------------ for requests

    def find(self, name: str, lora: str | None = None) -> StoredSession:
        """Return the session that a request of the adapter ``lora`` continues, by default the session's. Raises
        UnknownSessionError, SessionConflictError."""
        session = self._table.get(self._database, name, _OWNER)
        check_identity(session, self._info.name, self._identity(self._adapter(lora or session.requested)))
        return session

    def _identity(self, adapter: Adapter | None) -> dict[str, str]:
        digest = "" if adapter is None else adapter.digest
        return identity_facts(self._info.identity, self._core.weights.digest, digest)

    def _content(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]] | None,
        prompt: Prompt | None,
        tools: Sequence[Mapping[str, Any]] | None,
        template: Mapping[str, Any] | None,
        lora: str | None,
    ) -> Content:
        if (messages is None) == (prompt is None):
            raise RequestError(
                f"{'none of messages and prompt' if prompt is None else 'messages and prompt'} given; a session is "
                "saved from one of them",
                param="messages",
            )
        if messages is not None:
            before = self._find(name, lora)
            known = None if before is None else known_prefix(before)
            return self._chat.content(messages, template, tools, known)
        assert prompt is not None
        return Content(tokens=self._tokenizer.encode(prompt) if isinstance(prompt, str) else token_ids(prompt))

    def _find(self, name: str, lora: str | None = None) -> StoredSession | None:
        try:
            return self.find(name, lora)
        except WeftError:
            return None

    # ------------------------------------------------------------------ states

    def _bring(self, session: StoredSession) -> tuple[int, PinState]:
        """Bring the state of ``session`` into memory, and pin it. Return the tokens that were computed for it. A prompt
        never resumes at its own end, so a state in the store is restored by a prompt with one more token."""
        state, count = self._pin(session), session.token_count
        if state.tokens == count:
            return 0, state
        tokens, pictures = tokens_of(session), list[PlacedPicture]()
        if session.keys:
            encoded = self._chat.encoded(session)
            check_pictures(session, encoded)
            pictures = encoded.pictures
        computed = 0
        if state.is_stored and count < self._info.sizes.max_model_len:
            computed = self._compute(session, [*tokens, tokens[-1]], pictures) - 1
            state = self._pin(session)
        if state.tokens != count:
            computed = self._compute(session, tokens, pictures)
            state = self._pin(session)
        return computed, state

    def _compute(self, session: StoredSession, tokens: list[int], pictures: list[PlacedPicture]) -> int:
        """Return how many of ``tokens`` the engine computed."""
        request = self._request(tokens, pictures, session.requested)
        [completion] = self._calls.complete([Call(request, self._tokenizer)], progress=False)
        return len(tokens) - completion.cached_tokens

    def _pin(self, session: StoredSession, *, waits: bool = True) -> PinState:
        named = [named_prefix(session)]
        with self._calls.turn.take():
            self._pinning.pin(named)
        if waits:
            for _ in range(STEPS_TO_CLOSE):  # by then requests that ended are in the prefix tree
                self._calls.step()
            self._pinning.offer_again(named)
            end_s = time.monotonic() + PIN_WRITE_S
            while not self._pinning.is_settled(named) and time.monotonic() < end_s:
                self._calls.step()
                if not self._core.has_work:
                    time.sleep(_LOOK_S)
        return self._pinning.states(named)[0]

    def _pin_as(self, failed: StoredSession, before: StoredSession | None) -> None:
        """Undo the pin of ``failed``, which could not be saved: pin ``before`` again, if there was one."""
        if before is None:
            self._unpin([failed.session_id])
        else:
            self._pin(before, waits=False)

    def _pin_all(self) -> None:
        listed = self._table.listed(self._database, _OWNER)
        with self._calls.turn.take():
            self._pinning.pin([named_prefix(session) for session in listed if session.model == self._info.name])

    def _unpin(self, keys: Sequence[str]) -> None:
        with self._calls.turn.take():
            self._pinning.unpin(keys)

    def _sweep(self) -> None:
        gone = self._table.sweep(self._database)
        if gone:
            self._unpin(gone)

    def list(self) -> list[Session]:
        """Return all sessions, the oldest first."""
        self._sweep()
        return [shown(session) for session in self._table.listed(self._database, _OWNER)]


def named_prefix(session: StoredSession) -> NamedPrefix:
    return NamedPrefix(session.session_id, session.engine_salt, session.compared)


def shown(session: StoredSession, state: PinState | None = None, computed: int | None = None) -> Session:
    return Session(
        name=session.name,
        model=session.requested or session.model,
        parent=session.parent,
        created_at=session.created_s,
        expires_at=session.expires_s,
        tokens=session.token_count,
        bytes=session.nbytes,
        computed_tokens=computed,
        in_memory=None if state is None else state.tokens,
        stored=None if state is None else state.is_stored,
    )
