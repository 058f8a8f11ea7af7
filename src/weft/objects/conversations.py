"""Conversations of sessions: they become tokens when a session is saved, and new messages or prompts continue them.

messages --template, tokenizer--> Prompt --conversation_content--> Content        (``weft.objects.sessions``)
StoredSession + messages --continued_chat--> ConversationFields, KnownPrefix
StoredSession + prompts  --continued_prompts--> prompts after its tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.objects.sessions import Content, StoredSession, conflict, decoded, tokens_of
from weft.text.chat import ChatMessage
from weft.text.chat_request import ConversationFields
from weft.text.prompt import KnownPrefix, Prompt, text_digest

_messages = msgspec.json.Decoder(list[ChatMessage]).decode


def conversation_content(
    prompt: Prompt, messages: Sequence[Any], tools: Sequence[Any] | None, variables: Mapping[str, Any] | None
) -> Content:
    """Return the content of a conversation that was rendered to ``prompt``."""
    text = prompt.text or ""
    return Content(
        tokens=prompt.tokens,
        keys=picture_keys(prompt),
        messages=msgspec.json.encode(messages),
        tools=msgspec.json.encode(tools) if tools else b"",
        variables=msgspec.json.encode(variables) if variables else b"",
        chars=len(text),
        digest=text_digest(text),
    )


def picture_keys(encoded: Prompt) -> bytes:
    """Return the keys of a prompt with pictures as int32 bytes; empty for a prompt without pictures."""
    if not encoded.pictures:
        return b""
    import numpy as np  # most conversations have no pictures, and HTTP processes start without it

    from weft.pictures import prompt_keys

    return prompt_keys(np.asarray(encoded.tokens, np.int32), encoded.pictures).tobytes()


def check_pictures(session: StoredSession, encoded: Prompt) -> None:
    """Raise SessionConflictError if the pictures of ``encoded``, which were read again, differ from those of
    ``session``."""
    if picture_keys(encoded) != session.keys:
        raise conflict(session, "has pictures that have changed since")


def known_prefix(session: StoredSession) -> KnownPrefix | None:
    """Return the tokens that stand for the text of ``session``; None where its text is not known. None with pictures
    too: the text does not identify them."""
    if not session.digest or session.keys:
        return None
    return KnownPrefix(tokens_of(session), session.chars, session.digest)


def conversation_of(session: StoredSession) -> ConversationFields:
    """Return the conversation of ``session`` by itself, without the beginning of an answer."""
    return ConversationFields(
        messages=_messages(session.messages),
        tools=decoded(session.tools) if session.tools else None,
        variables=decoded(session.variables) if session.variables else None,
        add_generation_prompt=False,
    )


def continued_chat(session: StoredSession, conversation: ConversationFields) -> ConversationFields:
    """Return the conversation of ``session``, followed by ``conversation``. Raise RequestError for a session without
    messages."""
    if not session.messages:
        raise RequestError(
            f"the session {session.name!r} was saved from a prompt and has no messages; /v1/completions continues it",
            param="session",
        )
    saved = conversation_of(session)
    variables = conversation.variables
    if saved.variables is not None:
        variables = {**saved.variables, **(variables or {})}
    return msgspec.structs.replace(
        conversation,
        messages=[*saved.messages, *conversation.messages],
        tools=saved.tools if conversation.tools is None else conversation.tools,
        variables=variables,
    )


def continued_prompts(session: StoredSession, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return ``prompts``, each after the tokens of ``session``. Raise RequestError for a session with pictures."""
    if session.keys:
        raise RequestError(f"the session {session.name!r} has pictures, so only a chat continues it", param="session")
    before = tokens_of(session)
    return [
        Prompt(
            [*before, *prompt.tokens],
            None,
            [len(before) + position for position in prompt.boundaries],
            [len(before) + position for position in prompt.marks],
        )
        for prompt in prompts
    ]
