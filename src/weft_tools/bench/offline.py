"""The engine without a server, in this process: no HTTP, no other process, tokens in and out.

    latency      a batch again and again     seconds of each, from the first prompt to the last token
    throughput   many prompts at once        requests and tokens per second

Answers are greedy and have exactly the requested length.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.api import Engine
from weft.errors import ConfigError
from weft.request import SamplingParams
from weft_tools.bench.prompts import ORDINARY_ID_MIN, SampleRequest

PERCENTILES = (10, 25, 50, 75, 90, 99)


def exactly(tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, n=n)


def check_lengths(engine: Engine, requests: Sequence[SampleRequest]) -> None:
    """Raise ConfigError if a request is longer than the engine's context."""
    limit = engine.info.sizes.max_model_len
    longest = max(_tokens(engine, request) + request.output_tokens for request in requests)
    if longest > limit:
        raise ConfigError(
            f"the longest request has {longest} tokens, prompt and answer together; the "
            f"context is {limit} (--max-model-len): ask for less with --input-len and "
            "--output-len",
            param="--input-len",
        )


def _tokens(engine: Engine, request: SampleRequest) -> int:
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, list) else len(engine.tokenizer.encode(prompt))


def latency(
    engine: Engine,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    n: int,
    warmups: int,
    iterations: int,
    on_done: Callable[[float], None],
    seed: int = 0,
) -> dict[str, Any]:
    """Return results by the standard keys, in seconds. Each iteration has new prompts, so that no cache helps."""
    dice = random.Random(seed)
    vocab_size = engine.info.vocab_size
    low = min(ORDINARY_ID_MIN, vocab_size // 2)
    check_lengths(engine, [SampleRequest([0] * input_len, output_len)])
    sampling, latencies = exactly(output_len, n), []
    for number in range(warmups + iterations):
        prompts = [[dice.randrange(low, vocab_size) for _ in range(input_len)] for _ in range(batch_size)]
        began = time.perf_counter()
        engine.generate(prompts, sampling, progress=False)
        seconds = time.perf_counter() - began
        if number >= warmups:
            latencies.append(seconds)
        on_done(seconds)
    spread = {str(percent): float(np.percentile(latencies, percent)) for percent in PERCENTILES}
    return {"avg_latency": float(np.mean(latencies)), "latencies": latencies, "percentiles": spread}


def throughput(engine: Engine, requests: Sequence[SampleRequest], *, n: int = 1, warmups: int = 0) -> dict[str, Any]:
    """Return results by the standard keys; token counts include prompts and answers unless the key names only one of
    them."""
    check_lengths(engine, requests)
    sampling = [exactly(request.output_tokens, n) for request in requests]
    prompts = [request.prompt for request in requests]
    if warmups:
        engine.generate(prompts[:warmups], sampling[:warmups], progress=False)
        engine.flush_cache()
    began = time.perf_counter()
    done = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - began
    read = sum(len(completion.prompt_tokens) for completion in done if completion.index == 0)
    generated = sum(len(completion.tokens) for completion in done)
    return {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": read + generated,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (read + generated) / seconds,
        "total_input_tokens": read,
        "total_output_tokens": generated,
        "output_tokens_per_second": generated / seconds,
        "total_cached_tokens": sum(completion.cached_tokens for completion in done if completion.index == 0),
    }
