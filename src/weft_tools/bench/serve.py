"""A bounded load on a running server of any engine, and the arrival time of each part of its answers.

    /v1/models   models and context length  (unreachable, unknown model, too long: reported before the load)
    one request  not counted                (an error of every request is reported once)
    warm-ups     not counted
    the load     requests at their arrival times, at most --max-concurrency open  --> figures (``metrics``)

Streaming is always on: without it a client cannot tell a first token from a last. Tokens of one chunk share
the gap before it, so a server that sends many at once is not rewarded. Errors go into the timing and are
never raised.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from weft.errors import ConfigError, EngineUnavailableError, UserError
from weft_tools.bench.prompts import SampleRequest, warm_up_of

VOCAB_SIZE_UNKNOWN = 1024
"""Vocabulary size if the server reports none: every real vocabulary has the ids below it."""
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Settings of a load. ``request_rate`` per second, infinity for all at once; ``max_concurrency`` None for no limit;
    ``extra_body`` overrides each request's own fields."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    warmups: int = 0
    seed: int = 0
    request_timeout_s: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    """The server's facts about the model; 0 if it reports none."""

    name: str
    max_model_len: int
    vocab_size: int


class Server:
    """A server under load. ``base_url`` with or without /v1."""

    def __init__(
        self,
        base_url: str,
        *,
        backend: str = "openai",
        endpoint: str | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        known = BACKENDS[backend]
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.endpoint_format = EndpointFormat(endpoint or known.path, known.body, known.note)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self.http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                transport=transport,
                # A new connection for each request, as in vllm bench: a server may close an idle connection just when
                # the # next request is sent on it, and llama-server does.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                timeout=httpx.Timeout(request_timeout_s, connect=_CONNECT_S, pool=None),
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"--base-url is {base_url!r}: {error}", param="--base-url") from None

    async def served(self, model: str | None) -> Served:
        """Return the model of that name, or the first. Raise ConfigError if no server answers or it has no such
        model."""
        answer = await self._get("/v1/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        by_name = {card["id"]: card for card in cards or () if isinstance(card, dict) and "id" in card}
        if not by_name:
            raise ConfigError(f"{self.url} lists no model", param="--base-url")
        name = model or next(iter(by_name))
        if name not in by_name:
            raise ConfigError(
                f"--model is {name!r}, and {self.url} has {', '.join(map(repr, by_name))}", param="--model"
            )
        card = by_name[name]
        return Served(name, int(card.get("max_model_len") or 0), int(card.get("vocab_size") or 0))

    async def queue_seconds(self) -> tuple[float, float]:
        """Return (seconds that requests waited, requests), summed since the server's start; zeros if it has no such
        metric. Engines with vLLM's names of metrics have ``..:request_queue_time_seconds``."""
        try:
            lines = (await self.http.get("/metrics")).text.splitlines()
        except httpx.HTTPError:
            return 0.0, 0.0
        seconds, count = (
            sum(
                float(line.rsplit(" ", 1)[1])
                for line in lines
                if re.match(rf"\w+:request_queue_time_seconds_{part}\b", line)
            )
            for part in ("sum", "count")
        )
        return seconds, count

    async def count_tokens(self, text: str) -> int:
        """Return the number of tokens of ``text`` by the server's tokenizer. Raise ConfigError if it has no
        /tokenize."""
        return int((await self._post("/tokenize", {"prompt": text}))["count"])

    async def text_of(self, tokens: list[int]) -> str:
        """Return the text of ``tokens`` by the server's tokenizer. Raise ConfigError if it has no /detokenize."""
        return str((await self._post("/detokenize", {"tokens": tokens}))["prompt"])

    async def _get(self, path: str) -> Any:
        try:
            response = await self.http.get(path)
            if response.is_error:
                raise UserError(f"{self.url}{path} answered {response.status_code}: {_words(response.text)}")
            return response.json()
        except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ConfigError(
                f"nothing that serves models answers at {self.url} ({why}); start a server "
                "with `weft serve`, or name another with --base-url",
                param="--base-url",
            ) from None

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = await self.http.post(path, json=body)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(
                f"{self.url} does not answer {path} ({error}), which this data set needs; try "
                "--backend openai, or lengths by hand",
                param="--dataset-name",
            ) from None


def check_lengths(requests: Sequence[SampleRequest], served: Served) -> None:
    """Raise ConfigError if a prompt of tokens and its answer exceed the server's context."""
    longest = max(
        (request for request in requests if isinstance(request.prompt, list)),
        default=None,
        key=lambda request: len(request.prompt) + request.output_tokens,
    )
    if longest is None or not served.max_model_len:
        return
    total = len(longest.prompt) + longest.output_tokens
    if total > served.max_model_len:
        raise ConfigError(
            f"a request of {len(longest.prompt)} tokens and {longest.output_tokens} to be "
            f"made is {total}; the server takes {served.max_model_len}: ask for less with "
            "--random-input-len, --random-output-len, --random-prefix-len or "
            "--random-range-ratio",
            param="--random-input-len",
        )


async def run_load(
    server: Server,
    served: Served,
    requests: Sequence[SampleRequest],
    load: LoadConfig,
    *,
    on_done: Callable[[Timing], None] = lambda timing: None,
) -> tuple[list[Timing], float]:
    """Return the timings in the order of ``requests``, and the seconds from the first sending to the last end.

    Raises UserError or EngineUnavailableError with the server's message if the first request fails.
    """

    def body_of(request: SampleRequest) -> dict[str, Any]:
        return server.endpoint_format.body(served.name, request.prompt, request.output_tokens) | load.extra_body

    def rehearse(number: int) -> Awaitable[Timing]:
        body = body_of(warm_up_of(requests[number % len(requests)], number))
        return one_request(server.http, body, server.endpoint_format)

    bodies = [body_of(request) for request in requests]
    first = await rehearse(0)
    if first.error is not None or not first.chunks:
        why = first.error or "it brought no token"
        kind = EngineUnavailableError if why.startswith("5") else UserError
        raise kind(
            f"the first request to {server.url}{server.endpoint_format.path} failed, so no load was "
            f"put on it: {_words(why)}"
        )
    gate = asyncio.Semaphore(load.max_concurrency or len(bodies))

    async def send(body: dict[str, Any], due_s: float) -> Timing:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        async with gate:
            timing = await one_request(server.http, body, server.endpoint_format)
        on_done(timing)
        return timing

    together = load.max_concurrency or max(load.warmups, 1)
    for start in range(0, load.warmups, together):
        await asyncio.gather(*map(rehearse, range(start + 1, min(start + together, load.warmups) + 1)))
    times = arrival_times(len(bodies), load.request_rate, load.burstiness, seed=load.seed)
    began = time.perf_counter()
    timings = await asyncio.gather(*(send(body, began + arrival) for body, arrival in zip(bodies, times, strict=True)))
    return timings, max(time.perf_counter() - began, 1e-9)


def _words(text: str) -> str:
    """Return the message of an OpenAI error object, with its status; else the text unchanged."""
    before, brace, _ = text.partition("{")
    try:
        message = json.loads(text[len(before) :])["error"]["message"] if brace else text
    except (ValueError, TypeError, KeyError):
        return text[:300]
    return before + str(message) if brace else text[:300]


def arrival_times(count: int, rate: float, burstiness: float = 1.0, *, seed: int = 0) -> list[float]:
    """Return the seconds after the start at which each of ``count`` requests arrives, the first at 0. ``rate`` per
    second, infinity for all at once; both above 0."""
    assert rate > 0 < burstiness
    if math.isinf(rate):
        return [0.0] * count
    dice = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += dice.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times


@dataclass(slots=True)
class Timing:
    """The times of one request. ``chunks``: (when, tokens in the chunk). ``ended``: 0 if not recorded.
    ``prompt_tokens``, ``completion_tokens`` and the two counts of drafts: the server's, 0 if it reports none."""

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
        return [(then - before) / count for (before, _), (then, count) in pairwise(self.chunks) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class EndpointFormat:
    """The request and chunk format of an endpoint. ``body(model, prompt, output_tokens)``: greedy, streamed,
    exactly ``output_tokens`` tokens; ``note(timing, chunk)`` records a chunk."""

    path: str
    body: Callable[[str, list[int] | str, int], dict[str, Any]]
    note: Callable[[Timing, dict[str, Any]], None]


async def one_request(client: httpx.AsyncClient, body: dict[str, Any], endpoint_format: EndpointFormat) -> Timing:
    """Send a request and time its answer. Errors go into the timing and are not raised."""
    timing = Timing(time.perf_counter())
    try:
        async with client.stream("POST", endpoint_format.path, json=body) as response:
            if response.is_error:
                timing.error = f"{response.status_code}: {(await response.aread()).decode()[:500]}"
                return timing
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[len("data:") :].strip()) != "[DONE]":
                    endpoint_format.note(timing, json.loads(data))
    except (httpx.HTTPError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.ended = time.perf_counter()
    return timing


def _completion_body(model: str, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
    }


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
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


OPENAI = EndpointFormat("/v1/completions", _completion_body, _note)
OPENAI_CHAT = EndpointFormat("/v1/chat/completions", _chat_body, _note)
BACKENDS: dict[str, EndpointFormat] = {"openai": OPENAI, "vllm": OPENAI, "openai-chat": OPENAI_CHAT}
