"""The body of /v1/responses: its fields, their ranges, and what is refused.

``SamplingFields`` bring what every dialect takes. The rest is OpenAI's:

    text.format         what the answer must match               as response_format of chat
    reasoning.effort    how long the model thinks                as reasoning_effort of chat
    include             message.output_text.logprobs             others ask for parts of hosted tools

``service_tier``, ``user``, ``safety_identifier``, ``max_tool_calls`` and the ``prompt_cache_*`` fields are
accepted and change nothing: there is one tier, no hosted tool, and every prefix is cached.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.errors import RequestError
from weft.request import LOGPROBS_MAX
from weft.server.protocol import AnswerId, Int, SamplingFields, Unserved

ITEMS_DEFAULT, ITEMS_MAX = 20, 100
"""Of one page of input items."""
METADATA_MAX, METADATA_KEY_CHARS, METADATA_VALUE_CHARS = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
INCLUDES = frozenset({
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url"})
_VERBOSITIES = (None, "medium")


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """``summary``: answers have the reasoning itself, in ``content``, and no summary of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class StreamingOptions(msgspec.Struct, kw_only=True):
    """Deltas are never padded, so ``include_obfuscation`` changes nothing."""

    include_obfuscation: bool | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """``input``: text, or items as ``weft.server.responses.items`` reads them."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    previous_response_id: AnswerId | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: StreamingOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


UNSERVED_IN_RESPONSES: Unserved = {
    "conversation": ("use previous_response_id", ()),
    "prompt": ("this server stores no prompt templates", ()),
    "context_management": ("prompts are never edited on the server; truncation auto drops old turns", ([],)),
    "moderation": ("this server moderates nothing", ()),
    "n": ("a response has one answer", (1,)),
    "messages": ("it belongs to /v1/chat/completions; use input", ()),
    "max_tokens": ("use max_output_tokens", ()),
    "max_completion_tokens": ("use max_output_tokens", ()),
    "logprobs": (f"use include: [{LOGPROBS!r}]", (False,)),
    "prompt_logprobs": ("it belongs to /v1/completions and /v1/chat/completions", ()),
    "reasoning_effort": ("use reasoning.effort", ()),
    "verbosity": ("it is not served", ("medium",)),
}
"""Field -> (why it is refused, values besides null that ask for nothing)."""


def check_fields(body: ResponsesBody) -> None:
    """What a type alone does not say. Raises RequestError that names the field."""
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise RequestError(f"max_output_tokens is {body.max_output_tokens}; it must be at least 1",
                           param="max_output_tokens")
    if not 0 <= (body.top_logprobs or 0) <= LOGPROBS_MAX:
        raise RequestError(f"top_logprobs is {body.top_logprobs}; it must be at least 0 and at most "
                           f"{LOGPROBS_MAX}", param="top_logprobs")
    for name in body.include or ():
        if name not in INCLUDES:
            raise RequestError(f"include has {name[:100]!r}; it takes {', '.join(sorted(INCLUDES))}",
                               param="include")
    if body.text is not None and body.text.verbosity not in _VERBOSITIES:
        raise RequestError("text.verbosity is not supported: it is not served", param="text.verbosity",
                           code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    _check_metadata(body.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > METADATA_MAX:
        raise RequestError(f"metadata has {len(metadata)} pairs; the limit is {METADATA_MAX}",
                           param="metadata")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARS or len(value) > METADATA_VALUE_CHARS:
            raise RequestError(f"metadata has a key of {len(key)} and a value of {len(value)} characters; "
                               f"the limits are {METADATA_KEY_CHARS} and {METADATA_VALUE_CHARS}",
                               param="metadata")
