"""The body of /v1/messages, its failures and the list of models in the shapes that Anthropic's clients read.

{"type": "error", "error": {"type": "invalid_request_error", "message": ...}, "request_id": ...}
"""

from __future__ import annotations

import datetime
from typing import Any

import msgspec

from weft.errors import ContextLengthError, WeftError
from weft.server.protocol import SamplingFields, Unserved


class MessageTurn(msgspec.Struct, kw_only=True):
    """A message of a request. ``content``: text, or blocks (text, thinking, tool_use, tool_result)."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class CountTokensBody(SamplingFields, kw_only=True):
    """The fields that shape a prompt."""

    messages: list[MessageTurn]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """A mark at the end of the last message."""


class MessagesBody(CountTokensBody, kw_only=True):
    """The body of /v1/messages. ``metadata`` and ``service_tier`` are accepted and change nothing."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


UNSERVED_IN_MESSAGES: Unserved = {
    "mcp_servers": ("this server calls no other servers", ([],)),
    "container": ("this server runs no code", ()),
    "context_management": ("prompts are never edited on the server", ({},)),
    "thread": ("this server keeps no conversations of this API; send all messages with each request", ()),
}
"""Reason and harmless values of each refused field: (why it is refused, values besides null that ask for nothing)."""

_ERROR_CODES = {"thread": "thread_unsupported_request"}
"""Codes, by refused field, that make Anthropic's clients repeat the request without the field."""
ANTHROPIC_VERSION = "anthropic-version"
"""A header that Anthropic's clients send with each request, and no others."""
REQUEST_ID_HEADER = "request-id"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    421: "permission_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_json(error: WeftError, request_id: str | None = None) -> bytes:
    """Return ``error`` as Anthropic's error object."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _KINDS.get(error.status, fallback)
    detail: dict[str, Any] = {"type": kind, "message": _message(error)}
    if error.code == "unsupported_parameter" and error.param in _ERROR_CODES:
        detail["details"] = {"error_code": _ERROR_CODES[error.param], "unsupported": [error.param]}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})


def _message(error: WeftError) -> str:
    """Return the message of ``error``; for a prompt that is too long, in the words that clients of this API look
    for."""
    if not isinstance(error, ContextLengthError) or error.tokens is None or error.limit is None:
        return error.message
    if error.tokens < error.limit:  # the prompt is not too long
        return error.message
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum. {error.message}"


def anthropic_card(card: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a model with Anthropic's fields next to OpenAI's."""
    created = datetime.datetime.fromtimestamp(card["created"], datetime.UTC)
    return {
        **card,
        "type": "model",
        "display_name": card["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def anthropic_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of all models, which is one page."""
    ids = [card["id"] for card in cards]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": [anthropic_card(card) for card in cards], "has_more": False, **ends}
