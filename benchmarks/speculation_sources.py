"""What drafts cost and bring, without a model: microseconds of the sources, and tokens per step.

    python -m benchmarks.speculation_sources

Texts are invented: tokens of a skewed vocabulary, and copies with edits at 5 % of their places. Steps cost
what a CPU with 16-bit tiles measured for 1 to 16 rows.

Microseconds are CPU time of one thread: the mean over all steps of what the drafter does, from the first
token of a sequence to its end, at one row. Each text is repeated. A call of the drafter counts with the least
of its times, since other processes share the caches and the core."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from weft.costs.rows import RowCosts
from weft.memory.prefix.tree import PrefixTree
from weft.speculation.drafter import SOURCES, SourceName
from weft.speculation.speculator import Speculator
from weft_tools.sim.speculation import KnownText, ReplayedSpeculation, replay

STEP_MS = {1: 26.8, 2: 27.4, 4: 28.9, 8: 32.2, 16: 42.0}
VOCABULARY = 50_000


def prose(seed: int, length: int, *, vocabulary: int = VOCABULARY, skew: float = 0.4) -> list[int]:
    """Tokens without structure, the frequent ones far more frequent."""
    chance = random.Random(seed)
    return [int(chance.paretovariate(skew)) % vocabulary for _ in range(length)]


def edited(text: list[int], share: float, seed: int, *, vocabulary: int = VOCABULARY) -> list[int]:
    """``text`` with an edit at ``share`` of its places: up to four tokens replaced, added or removed."""
    chance = random.Random(seed)
    result: list[int] = []
    at = 0
    while at < len(text):
        if chance.random() >= share:
            result.append(text[at])
            at += 1
            continue
        if chance.random() < 2 / 3:
            result += [chance.randrange(vocabulary) for _ in range(chance.randint(1, 4))]
        at += chance.randint(0, 4)
    return result


def agent(turns: int) -> list[KnownText]:
    """An agent that reads files and writes them back with edits; its context grows by each turn."""
    texts, prompt = [], prose(1, 400)
    for turn in range(turns):
        file = prose(100 + turn % 3, 500)
        answer = [*prose(200, 60), *edited(file, 0.03, turn), *prose(300 + turn, 80)]
        prompt = [*prompt, *file, *prose(400 + turn, 60)]
        texts.append(KnownText(prompt, answer))
        prompt = [*prompt, *answer]
    return texts


class TimedCalls:
    """A drafter whose calls are timed, in nanoseconds of the thread."""

    def __init__(self, drafter: Speculator) -> None:
        self._drafter = drafter
        self.nanoseconds: list[int] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._drafter, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            result = call(*args, **kwargs)
            self.nanoseconds.append(time.thread_time_ns() - began)
            return result

        return timed


def replayed(
    sources: tuple[SourceName, ...], texts: Sequence[KnownText], repeats: int
) -> tuple[ReplayedSpeculation, float]:
    """What drafts bring, and microseconds of the drafter in a step."""
    least: list[int] = []
    for _ in range(repeats):
        tree = PrefixTree(paged=False)
        drafter = TimedCalls(Speculator(sources, costs=RowCosts(STEP_MS), tree=tree))
        result = replay(drafter, texts, RowCosts(STEP_MS), tree)
        least = [*map(min, least, drafter.nanoseconds)] if least else drafter.nanoseconds
        assert len(least) == len(drafter.nanoseconds), "drafts depend on time"
    return result, sum(least) / 1000 / result.steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    empty = time.thread_time_ns
    overhead = min(-empty() + empty() for _ in range(1000)) / 1000
    file = prose(7, 1000)
    edit = edited(file, 0.05, 8)
    cases: list[tuple[str, tuple[SourceName, ...], list[KnownText]]] = [
        ("1,000 tokens, 5 % edited, prediction", ("prediction",), [KnownText(prose(9, 300), edit, prediction=file)]),
        ("the same, all sources", SOURCES, [KnownText(prose(9, 300), edit, prediction=file)]),
        ("the same, file in the prompt", ("suffix",), [KnownText([*prose(9, 300), *file], edit)]),
        ("the same question again", ("tree",), [KnownText(prose(9, 300), file)] * 2),
        ("agent, 8 turns, 1,000 to 9,000 tokens", SOURCES, agent(8)),
        ("text without repetition", SOURCES, [KnownText(prose(seed, 300), prose(50 + seed, 500)) for seed in range(6)]),
        (
            "the same behind 4,000 tokens",
            SOURCES,
            [KnownText(prose(seed, 4000), prose(50 + seed, 300)) for seed in range(4)],
        ),
        ("the same behind 100,000 tokens", SOURCES, [KnownText(prose(3, 100_000), prose(4, 300))]),
    ]
    print(
        f"{'text':<40} {'tokens/step':>11} {'accepted':>9} {'tokens/s':>9} {'us/step':>8}"
        f"   (the clock: {overhead:.1f} us a call, in these figures)"
    )
    for name, sources, texts in cases:
        result, micros = replayed(sources, texts, repeats)
        accepted = f"{result.accepted / result.drafted:.0%}" if result.drafted else "-"
        print(
            f"{name:<40} {result.tokens_per_step:>11.2f} {accepted:>9} {result.speedup:>8.2f}x {micros:>8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
