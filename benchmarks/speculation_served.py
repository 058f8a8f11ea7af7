"""Requests with and without speculation on one model: is ``auto`` ever slower, and where is it faster?

    python -m benchmarks.speculation_served [--model DIR] [--speculate auto] [--rounds 5] [--only NAME]

Two engines in one process answer the same requests in turn. A line has the ratio of their best seconds,
prompts included, and the tokens of a step of one sequence. The texts must be equal.

    recall     questions about lists of names and numbers
    story      answers without repetition
    agent      a conversation that repeats a list and changes one line of it in each turn
    batch      32 stories at once
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from weft import Engine
from weft.speculation.speculator import Speculator
from weft.speculation.suffix import AnswerLibrary

NAMES = ("Bemo", "Tarlik", "Venta", "Kolu", "Sadi", "Morfan", "Helka", "Juno")
ANIMALS = ("cat", "dog", "horse", "bird", "fish", "fox", "bear", "mouse")
Ask = Callable[[Engine], list[str]]


def _said(engine: Engine, turns: list[tuple[str, str]], tokens: int) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    return engine.chat(messages, temperature=0.0, max_tokens=tokens).text


def recall(engine: Engine) -> list[str]:
    chance = random.Random(1)
    facts = ", ".join(f"{name}: {chance.randrange(10_000, 99_999)}" for name in NAMES)
    return [_said(engine, [("user", facts), ("assistant", "Noted."), ("user", f"What is {name}'s number?")],
                  32) for name in NAMES]


def story(engine: Engine) -> list[str]:
    return [_said(engine, [("user", f"Tell me a story about a {animal}.")], 160) for animal in ANIMALS]


def agent(engine: Engine) -> list[str]:
    chance, turns, answers = random.Random(2), [], []
    lines = [f"{name}: {chance.randrange(10_000, 99_999)}" for name in NAMES]
    for turn, name in enumerate(NAMES):
        lines[turn] = f"{name}: {chance.randrange(10_000, 99_999)}"
        turns.append(("user", f"List: {', '.join(lines)}. What is {name}'s number?"))
        answers.append(_said(engine, turns, 48))
        turns.append(("assistant", answers[-1]))
    return answers


def batch(engine: Engine) -> list[str]:
    prompts = [f"{number}. A story about a {ANIMALS[number % 8]}:" for number in range(32)]
    answers = engine.generate(prompts, temperature=0.0, max_tokens=64)
    return [answer.text for answer in answers]


WORKLOADS: dict[str, Ask] = {"recall": recall, "story": story, "agent": agent, "batch": batch}


def _forget(engine: Engine) -> None:
    """Prefixes and answers of earlier rounds."""
    engine.flush_cache()
    drafter = engine._core.drafter
    if isinstance(drafter, Speculator):
        drafter._library = AnswerLibrary()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--only", choices=tuple(WORKLOADS))
    asked = parser.parse_args()
    engines = [Engine(asked.model, memory=asked.memory, speculate=speculate)
               for speculate in ("off", asked.speculate)]
    for name, ask in WORKLOADS.items():
        if asked.only not in (None, name):
            continue
        seconds: list[list[float]] = [[], []]
        before = engines[1].stats()
        for _ in range(asked.rounds):
            texts = []
            for engine, own in zip(engines, seconds, strict=True):
                _forget(engine)
                began_s = time.perf_counter()
                texts.append(ask(engine))
                own.append(time.perf_counter() - began_s)
            assert texts[0] == texts[1], "drafts changed an answer"
        after = engines[1].stats()
        speculation = after.speculation
        accepted = speculation.accepted - before.speculation.accepted
        tokens = after.generation_tokens - before.generation_tokens
        off_s, on_s = (min(own) for own in seconds)
        print(f"{name:7} {off_s * 1e3:8.1f} ms off  {on_s * 1e3:8.1f} ms {asked.speculate}  "
              f"ratio {off_s / on_s:5.2f}  {tokens / max(1, tokens - accepted):5.2f} a step", flush=True)
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
