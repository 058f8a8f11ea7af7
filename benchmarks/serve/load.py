"""A bounded load on any OpenAI-compatible server, and what came of it.

    plan (seeded) -> N requests, at most C open, arriving at once or as a Poisson process
                  -> for each: when it was sent, when each chunk came, how many tokens it had
                  -> Summary: requests/s, output tokens/s, time to first token, time between tokens

    python -m benchmarks.serve.load --url http://127.0.0.1:8000 --requests 32 --concurrency 8

Prompts are token ids (``--text`` for servers that take text only) drawn from the seed, so two servers get
the same ones. Times are the client's, over HTTP, with streaming on. "Between tokens" is the gap between two
chunks of one answer divided by the tokens of the second; a server that sends several tokens per chunk is
not rewarded for it. Only ``vocab_size`` and the URL are needed to know of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import httpx

ORDINARY_ID_MIN = 300
"""Ids below are special tokens and bytes in most vocabularies."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``request_rate`` (per second) None sends as fast as ``concurrency`` allows. ``shared_tokens`` of each
    prompt are the same for all requests."""

    requests: int = 32
    prompt_tokens: int = 256
    output_tokens: int = 64
    concurrency: int = 32
    request_rate: float | None = None
    shared_tokens: int = 0
    vocab_size: int = 1024
    seed: int = 0
    as_text: bool = False

    def prompts(self) -> list[list[int]]:
        """The token ids of every request's prompt."""
        dice = random.Random(self.seed)
        low = min(ORDINARY_ID_MIN, self.vocab_size // 2)
        shared = [dice.randrange(low, self.vocab_size) for _ in range(self.shared_tokens)]
        own = self.prompt_tokens - self.shared_tokens
        return [shared + [dice.randrange(low, self.vocab_size) for _ in range(own)]
                for _ in range(self.requests)]

    def arrivals(self) -> list[float]:
        """Seconds after the start at which each request comes."""
        if self.request_rate is None:
            return [0.0] * self.requests
        dice = random.Random(self.seed + 1)
        now, times = 0.0, []
        for _ in range(self.requests):
            times.append(now)
            now += dice.expovariate(self.request_rate)
        return times


@dataclass(slots=True)
class Timing:
    """One request: seconds on one clock. ``chunks`` are (when, tokens in it)."""

    sent: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def first_token_s(self) -> float:
        return self.chunks[0][0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [(then - before) / count for (before, _), (then, count) in pairwise(self.chunks)
                for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a load came to. Latencies are seconds; None where no request got that far."""

    requests: int
    failed: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    first_token_median_s: float | None
    first_token_p99_s: float | None
    between_tokens_median_s: float | None
    between_tokens_p99_s: float | None
    cached_tokens: int
    errors: tuple[str, ...] = ()


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of them lie, nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def summarise(timings: Sequence[Timing], seconds: float) -> Summary:
    done = [timing for timing in timings if timing.error is None and timing.chunks]
    first = [timing.first_token_s for timing in done]
    gaps = [gap for timing in done for gap in timing.gaps_s]
    return Summary(
        requests=len(timings), failed=len(timings) - len(done), seconds=seconds,
        requests_per_s=len(done) / seconds,
        output_tokens_per_s=sum(timing.output_tokens for timing in done) / seconds,
        first_token_median_s=statistics.median(first) if first else None,
        first_token_p99_s=percentile(first, 0.99),
        between_tokens_median_s=statistics.median(gaps) if gaps else None,
        between_tokens_p99_s=percentile(gaps, 0.99),
        cached_tokens=sum(timing.cached_tokens for timing in done),
        errors=tuple(sorted({timing.error for timing in timings if timing.error is not None}))[:5])


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server is asked. ``body(model, prompt, output_tokens)``: greedy, streamed, exactly so many
    tokens; ``note(timing, chunk)`` counts what a chunk brought."""

    path: str
    body: Callable[[str, list[int] | str, int], dict[str, Any]]
    note: Callable[[Timing, dict[str, Any]], None]


async def run_load(url: str, plan: LoadPlan, *, model: str | None = None, api_key: str | None = None,
                   extra: dict[str, Any] | None = None, dialect: Dialect | None = None,
                   transport: httpx.AsyncBaseTransport | None = None) -> tuple[Summary, list[Timing]]:
    """Send the plan's requests to ``url`` (with or without /v1). A failed request is counted, not raised."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    speech = dialect or OPENAI
    limits = httpx.Limits(max_connections=plan.concurrency, max_keepalive_connections=plan.concurrency)
    async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=None,
                                 transport=transport) as client:
        name = model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        gate = asyncio.Semaphore(plan.concurrency)
        begin = time.perf_counter()

        async def one(prompt: list[int], arrival_s: float) -> Timing:
            await asyncio.sleep(max(0.0, begin + arrival_s - time.perf_counter()))
            async with gate:
                content = " ".join(f"w{token}" for token in prompt) if plan.as_text else prompt
                body = speech.body(name, content, plan.output_tokens) | (extra or {})
                return await one_request(client, body, speech)

        timings = await asyncio.gather(*map(one, plan.prompts(), plan.arrivals()))
        return summarise(timings, time.perf_counter() - begin), list(timings)


async def one_request(client: httpx.AsyncClient, body: dict[str, Any], dialect: Dialect) -> Timing:
    """Send it and time what comes back. What goes wrong is in the timing, not raised."""
    timing = Timing(time.perf_counter())
    try:
        async with client.stream("POST", dialect.path, json=body) as response:
            if response.is_error:
                timing.error = f"{response.status_code}: {(await response.aread()).decode()[:200]}"
                return timing
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[len("data:"):].strip()) != "[DONE]":
                    dialect.note(timing, json.loads(data))
    except httpx.HTTPError as error:
        timing.error = f"{type(error).__name__}: {error}"
    return timing


def _completion_body(model: str, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True}


def _note(timing: Timing, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        timing.error = str(chunk["error"])
        return
    now = time.perf_counter()
    for choice in chunk.get("choices", []):
        ids = choice.get("token_ids")
        count = len(ids) if ids is not None else int(bool(choice.get("text")))
        if count:
            timing.chunks.append((now, count))
            timing.tokens += ids or []
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    timing.cached_tokens = details.get("cached_tokens") or timing.cached_tokens


OPENAI = Dialect("/v1/completions", _completion_body, _note)


def main(argv: Iterable[str] | None = None) -> int:
    about = "A bounded load on any OpenAI-compatible server, and what came of it."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.load", description=about)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model")
    parser.add_argument("--api-key")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--request-rate", type=float, help="per second, Poisson; default: all at once")
    parser.add_argument("--shared-tokens", type=int, default=0, help="tokens that all prompts share")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", action="store_true", help="prompts as text, for servers without token ids")
    asked = parser.parse_args(None if argv is None else list(argv))
    plan = LoadPlan(asked.requests, asked.prompt_tokens, asked.output_tokens, asked.concurrency,
                    asked.request_rate, asked.shared_tokens, asked.vocab_size, asked.seed, asked.text)
    summary, _ = asyncio.run(run_load(asked.url, plan, model=asked.model, api_key=asked.api_key))
    print(json.dumps({"plan": asdict(plan), "summary": asdict(summary)}, indent=2))
    return 1 if summary.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
