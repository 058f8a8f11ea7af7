"""The lines that engines are compared on: what is sent, and the figures that are read off the answers.

    a   32 requests at once, 256 -> 64                     output tokens per second
    b   one stream, 512 -> 128                             decode tokens per second; prefill tokens per second
    c   32 at once, 1,000 tokens shared, 50 own, 16 out    seconds for all of them
    d   8 conversations of 6 turns                         seconds for all; first token from turn 2 on
    e   Poisson arrivals, 256 -> 64, rate after rate       requests per second that kept the promise

A line asks a ``Side`` (an engine that is running) and returns figures by name. Which tokens are sent depends
on the line, the round and the vocabulary, not on the engine; nothing is sent twice to a process.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from benchmarks.serve.load import LoadPlan, Summary
from weft_tools.bench.prompts import ORDINARY_ID_MIN
from weft_tools.bench.serve import Timing

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Talk:
    """``conversations`` at once, each ``turns`` long: a turn sends all that was said and ``own`` tokens more.
    The first turn has ``opening`` tokens of its conversation's own in front."""

    conversations: int = 8
    turns: int = 6
    opening: int = 256
    own: int = 64
    output_tokens: int = 32
    vocab_size: int = 1024
    seed: int = 0

    def said(self, conversation: int, turn: int) -> list[int]:
        """What the user adds in a turn, counted from 0."""
        dice = random.Random(self.seed * 1_000_003 + conversation * 1009 + turn)
        count = self.own + (self.opening if turn == 0 else 0)
        low = min(ORDINARY_ID_MIN, self.vocab_size // 2)
        return [dice.randrange(low, self.vocab_size) for _ in range(count)]

    @property
    def tokens_max(self) -> int:
        return self.opening + self.turns * (self.own + self.output_tokens)


@dataclass(frozen=True, slots=True)
class Promise:
    """What a request is to keep to count: seconds to the first token, and mean seconds between tokens."""

    first_token_s: float = 2.0
    between_tokens_s: float = 0.2

    def kept(self, timing: Timing) -> bool:
        if timing.error is not None or not timing.chunks:
            return False
        gaps = timing.gaps_s
        return timing.first_token_s <= self.first_token_s and (
            not gaps or statistics.fmean(gaps) <= self.between_tokens_s
        )


class Side(Protocol):
    """An engine that is running."""

    def load(self, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
        """The plan's requests, as they arrive."""

    def talk(self, talk: Talk) -> list[list[Timing]]:
        """The timings of each conversation, turn by turn."""


class Failed(Exception):
    """An engine did not do what a line asked of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """``run(side, vocab_size, seed)``; ``higher``: of each figure, whether more is better."""

    about: str
    run: Callable[[Side, int, int], Figures]
    higher: Mapping[str, bool]


BURST = LoadPlan(requests=32, prompt_tokens=256, output_tokens=64, concurrency=32)
SINGLE = LoadPlan(requests=1, prompt_tokens=512, output_tokens=128, concurrency=1)
SHARED = LoadPlan(requests=32, prompt_tokens=1050, output_tokens=16, concurrency=32, shared_tokens=1000)
TALK = Talk()
ARRIVING = LoadPlan(requests=24, prompt_tokens=256, output_tokens=64, concurrency=24)
WARM_UP = LoadPlan(requests=8, prompt_tokens=256, output_tokens=4, concurrency=8, seed=999_983)


def answered(side: Side, plan: LoadPlan) -> tuple[Summary, list[Timing]]:
    """The plan's answers. Raises Failed where one is missing or short."""
    summary, timings = side.load(plan)
    if summary.failed:
        raise Failed(f"{summary.failed} of {summary.requests} requests failed: {'; '.join(summary.errors)}")
    short = sum(timing.output_tokens != plan.output_tokens for timing in timings)
    if short:
        raise Failed(f"{short} of {summary.requests} answers do not have {plan.output_tokens} tokens")
    return summary, timings


def burst(side: Side, vocab_size: int, seed: int) -> Figures:
    summary, _ = answered(side, replace(BURST, vocab_size=vocab_size, seed=seed))
    return {"output_tokens_per_s": summary.output_tokens_per_s}


def single(side: Side, vocab_size: int, seed: int) -> Figures:
    """Decoding from the first token to the last; prefill is the prompt over the time to the first token."""
    _, [timing] = answered(side, replace(SINGLE, vocab_size=vocab_size, seed=seed))
    decode_s = timing.chunks[-1][0] - timing.chunks[0][0]
    decoded = timing.output_tokens - timing.chunks[0][1]
    return {
        "decode_tokens_per_s": decoded / decode_s,
        "prefill_tokens_per_s": SINGLE.prompt_tokens / timing.first_token_s,
    }


def shared(side: Side, vocab_size: int, seed: int) -> Figures:
    summary, _ = answered(side, replace(SHARED, vocab_size=vocab_size, seed=seed))
    return {"seconds": summary.seconds}


def conversations(side: Side, vocab_size: int, seed: int) -> Figures:
    talks = side.talk(replace(TALK, vocab_size=vocab_size, seed=seed))
    errors = {timing.error for talk in talks for timing in talk if timing.error is not None}
    if errors or any(len(talk) != TALK.turns for talk in talks):
        raise Failed(f"conversations broke off: {'; '.join(sorted(errors)[:3])}")
    begin = min(talk[0].sent for talk in talks)
    end = max(talk[-1].chunks[-1][0] for talk in talks)
    later = [timing.first_token_s for talk in talks for timing in talk[1:]]
    return {"seconds": end - begin, "later_first_token_s": statistics.median(later)}


def goodput(side: Side, vocab_size: int, seed: int, *, rates: Sequence[float], promise: Promise) -> Figures:
    """Requests per second that kept the promise, at the rate where most did. The sweep ends at the first rate
    at which fewer than half of them kept it."""
    best = 0.0
    for number, rate in enumerate(rates):
        plan = replace(ARRIVING, vocab_size=vocab_size, seed=seed + 17 * number, request_rate=rate)
        summary, timings = answered(side, plan)
        kept = sum(map(promise.kept, timings))
        best = max(best, kept / summary.seconds)
        if 2 * kept < len(timings):
            break
    return {"goodput_per_s": best}


def lines(rates: Sequence[float], promise: Promise) -> dict[str, Line]:
    return {
        "a": Line("32 requests, 256 -> 64", burst, {"output_tokens_per_s": True}),
        "b": Line("one stream, 512 -> 128", single, {"decode_tokens_per_s": True, "prefill_tokens_per_s": True}),
        "c": Line("32 requests share 1,000 of 1,050, 16 out", shared, {"seconds": False}),
        "d": Line("8 conversations of 6 turns", conversations, {"seconds": False, "later_first_token_s": False}),
        "e": Line(
            f"Poisson, 256 -> 64, first token {promise.first_token_s:g} s, between {promise.between_tokens_s:g} s",
            partial(goodput, rates=rates, promise=promise),
            {"goodput_per_s": True},
        ),
    }
