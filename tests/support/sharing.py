"""Workloads whose requests share prefixes, for the simulator with the cache on.

A family of conversations over few system prompts: each request begins one (a system prompt and some tokens of
its own), continues one, repeats one, or diverges at some point of one. To continue is to send an earlier
prompt, its answer, and some tokens more. They come in bursts, so twins are computed side by side; salts
differ now and then; boundaries are declared, wrong ones among them.

The answers are those that the engine must give (``reference_tokens``). So a continued conversation matches
the engine's cached prefix to the token.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.support.scripted import hashed_token, reference_tokens
from tests.support.workload import EOS_IDS, VOCAB_SIZE, Arrival, Scenario, longest_alone, random_arena, random_cancels
from weft.config import Sizes
from weft.request import Request, SamplingParams
from weft.units import CHUNK_TOKENS, PAGE_TOKENS

LENGTH_MAX = 640
"""Ten chunks, forty pages: room for states along the way."""


def sharing_scenario(seed: int, *, requests: int | None = None) -> Scenario:
    """Return a scenario that follows from ``seed``."""
    random = Random(seed)
    arena = random_arena(random, random.randrange(10, 40), (0, 1, 2, 5, 20, 60))
    sizes = Sizes(
        max_model_len=longest_alone(arena, LENGTH_MAX),
        rows_max=random.choice([1, 2, 4, 8, 16]),
        step_tokens_max=random.choice([CHUNK_TOKENS, 128, 256, 512]),
        queue_max=random.choice([16, 64, 256]),
        memory_bytes=arena.arena_bytes,
        grid_tokens=PAGE_TOKENS if seed % 4 == 3 else CHUNK_TOKENS,
    )
    arrivals = _conversations(random, requests or random.choice([6, 15, 40]), sizes.max_model_len)
    return Scenario(
        seed=seed,
        arena=arena,
        sizes=sizes,
        arrivals=arrivals,
        cancels=random_cancels(random, arrivals),
        cache=True,
        flush_every_steps=random.choice([0, 0, 0, 0, 0, 0, 0, 3, 50]),
        fail_in_step=random.randrange(1, 60) if random.random() < 0.05 else None,
        snapshots=random.choice(
            [
                "auto",
                "auto",
                "auto",
                "prompt",
                "every:64",
                "every:128",
                "auto,decode:64",
                "decode:64,-preemption",
                "none",
            ]
        ),
    )


def _conversations(random: Random, count: int, max_model_len: int) -> tuple[Arrival, ...]:
    systems = [
        [(first * 17 + at * 5 + 1) % VOCAB_SIZE for at in range(random.randrange(1, max_model_len))]
        for first in range(random.choice([1, 2, 3]))
    ]
    salts = random.choice([("",), ("",), ("", "a"), ("", "a", "b")])
    pause_s = random.choice([1e-3, 1e-2, 0.2])
    past: list[Request] = []
    arrivals: list[Arrival] = []
    at_s = 0.0
    burst = 0
    for number in range(count):
        if burst == 0:
            at_s += random.expovariate(1 / pause_s)
            burst = random.choice([1, 1, 2, 8])
        burst -= 1
        prompt = _prompt(random, number, systems, past, max_model_len)
        request = _request(random, number, prompt, salts, max_model_len)
        past.append(request)
        arrivals.append(Arrival(at_s, request))
    return tuple(arrivals)


def _prompt(
    random: Random, number: int, systems: list[list[int]], past: list[Request], max_model_len: int
) -> list[int]:
    own = [(number * 31 + at * 7 + 3) % VOCAB_SIZE for at in range(random.choice([1, 5, 40, 100]))]
    kind = random.choice(["begin", "begin", "take up", "take up", "repeat", "part"])
    if kind == "begin" or not past:
        prompt = random.choice(systems) + own
    else:
        earlier = random.choice(past)
        prompt = list(earlier.prompt_tokens)
        if kind == "take up":
            prompt += answer(earlier, max_model_len) + own
        elif kind == "part":
            prompt = prompt[: random.randrange(len(prompt) + 1)] + own
    return prompt[: max_model_len - 1]


def answer(request: Request, max_model_len: int) -> list[int]:
    """Return the engine's answer; empty for a request whose answer may depend on the engine's own seed."""
    if not request.sampling.greedy:
        return []
    return reference_tokens(
        request.prompt_tokens,
        request.sampling,
        seed=0,
        eos_ids=EOS_IDS,
        max_model_len=max_model_len,
        next_token=hashed_token(VOCAB_SIZE),
    )[0]


def _request(random: Random, number: int, prompt: list[int], salts: tuple[str, ...], max_model_len: int) -> Request:
    room = max_model_len - len(prompt)
    boundaries = [random.randrange(-5, max_model_len + 50) for _ in range(random.choice([0, 0, 2]))]
    sampling = SamplingParams(
        n=random.choice([1, 1, 1, 1, 3]),
        temperature=random.choice([0.0, 0.0, 0.0, 1.0]),
        max_tokens=min(room, random.choice([0, 1, 10, 30, 100, room])),
        ignore_eos=random.random() < 0.7,
        prompt_logprobs=random.choice([None] * 7 + [1]),
        logprobs=random.choice([None, None, 1]),
    )
    return Request(
        request_id=f"r{number}",
        sampling=sampling,
        prompt_tokens=prompt,
        priority=random.choice([0, 0, 0, 1]),
        cache_salt=random.choice(salts),
        boundaries=boundaries,
    )


def without_cache(scenario: Scenario) -> Scenario:
    """Return the same scenario without the prefix cache."""
    return replace(scenario, cache=False)
