"""Types of answers that handlers write as plain objects. The description needs them; tests hold them true.

Answers of chat and completions have types of their own, which their handlers encode (``chat``,
``completions``). Here are the small ones, and the two shapes of the Messages dialect.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weft.server.responses.protocol import ResponsesBody


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "weft"
    root: str
    parent: str | None = None
    max_model_len: int
    vocab_size: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class InputTokens(msgspec.Struct):
    input_tokens: int


class HealthAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``status``: ok, sleeping, degraded, starting, draining or dead; ``reason`` for the last four.
    ``store``: present while the bucket of the store does not answer."""

    status: str
    reason: str | None = None
    level: int | None = None
    missing: list[str] | None = None
    store: str | None = None


class VersionAnswer(msgspec.Struct):
    version: str


class LoadAnswer(msgspec.Struct):
    server_load: int
    running: int
    waiting: int


class FlushedPrefixes(msgspec.Struct):
    bytes: int
    tokens: int


class SleepAnswer(msgspec.Struct):
    status: str
    level: int
    flushed: FlushedPrefixes


class WakeAnswer(msgspec.Struct):
    status: str
    tags: list[str] | None
    missing: list[str]


class IsSleepingAnswer(msgspec.Struct):
    is_sleeping: bool
    level: int
    missing: list[str]


class Message(msgspec.Struct, kw_only=True):
    """An answer in Anthropic's dialect. ``content``: thinking, text and tool_use blocks."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool


class ItemList(msgspec.Struct, kw_only=True):
    """``data``: message, reasoning, function_call and function_call_output items."""

    object: str = "list"
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ResponsePromptBody(ResponsesBody, kw_only=True):
    """The body of a response; only the fields that shape its prompt have an effect."""


class InputTokensAnswer(msgspec.Struct):
    object: str
    input_tokens: int


class ResponseStreamEvent(msgspec.Struct, kw_only=True):
    """``type``: response.created, response.output_text.delta and so on; the other fields go by it."""

    type: str
    sequence_number: int


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """A failure in Anthropic's dialect."""

    type: str = "error"
    error: MessagesErrorDetail
    request_id: str | None = None


class MessageEvent(msgspec.Struct, kw_only=True):
    """``type``: message_start, content_block_start, content_block_delta, content_block_stop, message_delta,
    message_stop, ping or error; the other fields go by it."""

    type: str
