"""A bounded load on any OpenAI-compatible server, and what came of it.

    plan (seeded) -> N requests, at most C open, arriving at once or as a Poisson process
                  -> for each: when it was sent, when each chunk came, how many tokens it had
                  -> Summary: requests/s, output tokens/s, time to first token, time between tokens

What the benchmarks of this folder and of ``peers`` send; for a load by hand there is ``weft bench serve``,
with which they share the client (``weft_tools.bench.serve``). Prompts are token ids drawn from the
seed, so two servers get the same ones. Only ``vocab_size`` and the URL are needed to know of the server.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from weft_tools.bench.prompts import ORDINARY_ID_MIN
from weft_tools.bench.serve import OPENAI, EndpointFormat, Timing, arrival_times, one_request


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

    def prompts(self) -> list[list[int]]:
        """The token ids of every request's prompt."""
        dice = random.Random(self.seed)
        low = min(ORDINARY_ID_MIN, self.vocab_size // 2)
        shared = [dice.randrange(low, self.vocab_size) for _ in range(self.shared_tokens)]
        own = self.prompt_tokens - self.shared_tokens
        return [shared + [dice.randrange(low, self.vocab_size) for _ in range(own)] for _ in range(self.requests)]

    def arrivals(self) -> list[float]:
        """Seconds after the start at which each request comes."""
        rate = math.inf if self.request_rate is None else self.request_rate
        return arrival_times(self.requests, rate, seed=self.seed + 1)


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
        requests=len(timings),
        failed=len(timings) - len(done),
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        output_tokens_per_s=sum(timing.output_tokens for timing in done) / seconds,
        first_token_median_s=statistics.median(first) if first else None,
        first_token_p99_s=percentile(first, 0.99),
        between_tokens_median_s=statistics.median(gaps) if gaps else None,
        between_tokens_p99_s=percentile(gaps, 0.99),
        cached_tokens=sum(timing.cached_tokens for timing in done),
        errors=tuple(sorted({timing.error for timing in timings if timing.error is not None}))[:5],
    )


async def run_load(
    url: str,
    plan: LoadPlan,
    *,
    model: str | None = None,
    api_key: str | None = None,
    extra: dict[str, Any] | None = None,
    endpoint_format: EndpointFormat | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> tuple[Summary, list[Timing]]:
    """Send the plan's requests to ``url`` (with or without /v1). A failed request is counted, not raised."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    speech = endpoint_format or OPENAI
    limits = httpx.Limits(max_connections=plan.concurrency, max_keepalive_connections=plan.concurrency)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, limits=limits, timeout=None, transport=transport
    ) as client:
        name = model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        gate = asyncio.Semaphore(plan.concurrency)
        begin = time.perf_counter()

        async def one(prompt: list[int], arrival_s: float) -> Timing:
            await asyncio.sleep(max(0.0, begin + arrival_s - time.perf_counter()))
            async with gate:
                body = speech.body(name, prompt, plan.output_tokens) | (extra or {})
                return await one_request(client, body, speech)

        timings = await asyncio.gather(*map(one, plan.prompts(), plan.arrivals()))
        return summarise(timings, time.perf_counter() - begin), list(timings)
