"""One request to an OpenAI-compatible server, and the arrival time of each part of its answer.

    EndpointFormat   path, body, content of a chunk      OPENAI: completions, OPENAI_CHAT: chat
    Timing           sent | (when, tokens) of each chunk | ended        seconds on this process's clock

Streaming is always on: without it a client cannot tell a first token from a last. A chunk may have several
tokens. They share the gap before it, so that a server that sends many at once is not rewarded. Errors go into
the timing and are never raised: one failed request must not end a load.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx


@dataclass(slots=True)
class Timing:
    """``chunks``: (when, tokens in the chunk). ``ended``: 0 if not recorded. ``prompt_tokens``,
    ``completion_tokens`` and the two counts of drafts: the server's, 0 if it reports none."""

    sent: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    error: str | None = None
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        return self.completion_tokens or sum(count for _, count in self.chunks)

    @property
    def first_token_s(self) -> float:
        return self.chunks[0][0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        """One gap for each token after the first chunk."""
        return [(then - before) / count for (before, _), (then, count) in pairwise(self.chunks)
                for _ in range(count)]


@dataclass(frozen=True, slots=True)
class EndpointFormat:
    """The request and chunk format of an endpoint. ``body(model, prompt, output_tokens)``: greedy, streamed,
    exactly ``output_tokens`` tokens; ``note(timing, chunk)`` records a chunk."""

    path: str
    body: Callable[[str, list[int] | str, int], dict[str, Any]]
    note: Callable[[Timing, dict[str, Any]], None]


async def one_request(client: httpx.AsyncClient, body: dict[str, Any],
                      endpoint_format: EndpointFormat) -> Timing:
    """Send a request and time its answer. Errors go into the timing and are not raised."""
    timing = Timing(time.perf_counter())
    try:
        async with client.stream("POST", endpoint_format.path, json=body) as response:
            if response.is_error:
                timing.error = f"{response.status_code}: {(await response.aread()).decode()[:500]}"
                return timing
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[len("data:"):].strip()) != "[DONE]":
                    endpoint_format.note(timing, json.loads(data))
    except (httpx.HTTPError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.ended = time.perf_counter()
    return timing


def _completion_body(model: str, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True}


def _chat_body(model: str, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
    assert isinstance(prompt, str), "a chat is text"
    body = _completion_body(model, prompt, output_tokens)
    del body["prompt"]
    return body | {"messages": [{"role": "user", "content": prompt}]}


def _note(timing: Timing, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        timing.error = str(chunk["error"])
        return
    now = time.perf_counter()
    for choice in chunk.get("choices", []):
        ids = choice.get("token_ids")
        count = len(ids) if ids is not None else int(bool(_text_of(choice)))
        if count:
            timing.chunks.append((now, count))
            timing.tokens += ids or []
    usage = chunk.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    timing.cached_tokens = details.get("cached_tokens") or timing.cached_tokens
    answer = usage.get("completion_tokens_details") or {}
    timing.accepted_drafts = answer.get("accepted_prediction_tokens") or timing.accepted_drafts
    timing.rejected_drafts = answer.get("rejected_prediction_tokens") or timing.rejected_drafts
    timing.prompt_tokens = usage.get("prompt_tokens") or timing.prompt_tokens
    timing.completion_tokens = usage.get("completion_tokens") or timing.completion_tokens


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return (choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            or delta.get("reasoning") or "")


OPENAI = EndpointFormat("/v1/completions", _completion_body, _note)
OPENAI_CHAT = EndpointFormat("/v1/chat/completions", _chat_body, _note)
