"""The body of /v1/messages, and its failures in the shape that Anthropic's clients read.

{"type": "error", "error": {"type": "invalid_request_error", "message": ...}, "request_id": ...}
"""

from __future__ import annotations

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
}
"""Reason and harmless values of each refused field: (why it is refused, values besides null that ask for nothing)."""

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
    detail = {"type": kind, "message": _message(error)}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})


def _message(error: WeftError) -> str:
    """Return the message of ``error``; for a prompt that is too long, in the words that clients of this API look
    for."""
    if not isinstance(error, ContextLengthError) or error.tokens is None or error.limit is None:
        return error.message
    if error.tokens < error.limit:  # the prompt is not too long
        return error.message
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum. {error.message}"
