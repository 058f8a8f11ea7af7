"""A request that continues a session: ``session`` in its body names it.

    session of a conversation + messages      the conversation goes on; its tokens stand for its text (KnownPrefix)
    session of tokens         + prompt        the prompt follows the tokens

The session itself does not change, so a hundred requests may continue one. They have its ``cache_salt``: under
another one its state would not be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.server.protocol import SamplingFields, key_of_request
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.server.sessions.objects import SessionConflictError, SessionStore, StoredSession, UnknownSessionError
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields
from weft.text.prompt import KnownPrefix, Prompt

_messages = msgspec.json.Decoder(list[ChatMessage]).decode
_WORDS = {
    "weights": "weights",
    "config": "another config.json",
    "tokenizer": "another tokenizer",
    "adapter": "another adapter",
}


def session_store(service: Service) -> SessionStore:
    """Raises UnknownSessionError where this server keeps none."""
    if service.sessions is None:
        raise UnknownSessionError(
            "this server keeps no sessions (server.response_store off)", param="session", code="sessions_off"
        )
    return service.sessions


def identity_of(service: Service, model: ServedModel) -> dict[str, str]:
    """Return the facts by which tokens and states of ``model`` mean the same."""
    known = model.info.identity
    fleet = service.models.find(model.base).fleet
    updated = "" if fleet is None else fleet.weights_digest
    weights = "" if updated is None else updated[: len(known.get("weights", ""))] or known.get("weights", "")
    adapter = "" if model.adapter is None else model.adapter.digest
    return {
        "weights": weights,
        "config": known.get("config", ""),
        "tokenizer": known.get("tokenizer", ""),
        "adapter": adapter,
    }


def check_identity(service: Service, session: StoredSession, model: ServedModel) -> None:
    """Raises SessionConflictError, one line that names the first difference."""
    if session.model != model.base:
        raise _conflict(session, f"is of the model {session.model!r}, and the request asks {model.base!r}")
    for fact, now in identity_of(service, model).items():
        saved = session.identity.get(fact, "")
        if saved != now and (now or fact != "weights"):  # an HTTP worker does not know the weights of an update
            what = "other weights" if fact == "weights" else _WORDS[fact]
            raise _conflict(session, f"was saved with {what} ({saved[:12] or 'none'}, and now {now[:12] or 'none'})")


def _conflict(session: StoredSession, why: str) -> SessionConflictError:
    return SessionConflictError(
        f"the session {session.name!r} {why}: save it again", param="session", code="session_differs"
    )


async def session_of(service: Service, fields: SamplingFields, name: str, model: ServedModel) -> StoredSession:
    """Return the session that a request continues, and give the request its salt. Raises UnknownSessionError,
    SessionConflictError."""
    session = await session_store(service).get(name, key_of_request())
    check_identity(service, session, model)
    fields.cache_salt = session.salt
    service.metrics.count(model.base, "session_hits")
    return session


def known_prefix(session: StoredSession) -> KnownPrefix | None:
    if not session.digest:
        return None
    return KnownPrefix(tokens_of(session), session.chars, session.digest)


def tokens_of(session: StoredSession) -> list[int]:
    return memoryview(session.tokens).cast("i").tolist()


def continued_chat(session: StoredSession, conversation: ConversationFields) -> ConversationFields:
    """Return the conversation of ``session``, and then ``conversation``. Raises RequestError."""
    if not session.messages:
        raise RequestError(
            f"the session {session.name!r} was saved from a prompt and has no messages; /v1/completions continues it",
            param="session",
        )
    tools = conversation.tools if conversation.tools is not None or not session.tools else decoded(session.tools)
    variables = conversation.variables
    if session.variables:
        variables = {**decoded(session.variables), **(variables or {})}
    return msgspec.structs.replace(
        conversation, messages=[*_messages(session.messages), *conversation.messages], tools=tools, variables=variables
    )


def decoded(value: bytes) -> Any:
    return msgspec.json.decode(value)


def continued_prompts(session: StoredSession, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return ``prompts``, each after the tokens of ``session``."""
    before = tokens_of(session)
    return [
        Prompt(
            [*before, *prompt.tokens],
            None,
            [len(before) + at for at in prompt.boundaries],
            [len(before) + at for at in prompt.marks],
        )
        for prompt in prompts
    ]
