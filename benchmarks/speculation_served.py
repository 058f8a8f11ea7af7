"""Requests with and without speculation on one model: is ``auto`` ever slower, and where is it faster?

    python -m benchmarks.speculation_served [--model DIR] [--speculate auto] [--rounds 5] [--only NAME]

Two engines in one process answer the same requests in turn, each first in every other round. A line has the
ratio of their median seconds, prompts included, that of their CPU seconds, and the tokens of a step of one
sequence. The first round warms up and does not count. The texts must be equal.

    recall     questions about lists of names and numbers
    story      answers without repetition
    turns      a conversation that repeats a list and asks for one line of it: short answers, long prompts
    agent      a tool call in each turn that writes all records as JSON, of which one has changed
    batch      32 stories at once
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from weft import Engine
from weft.speculation.sources import AnswerLibrary
from weft.speculation.speculator import Speculator
from weft.text.grammars import json_grammar

NAMES = ("Bemo", "Tarlik", "Venta", "Kolu", "Sadi", "Morfan", "Helka", "Juno")
ANIMALS = ("cat", "dog", "horse", "bird", "fish", "fox", "bear", "mouse")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}, "code": {"type": "integer"}},
    "required": ["name", "city", "code"],
    "additionalProperties": False,
}
PEOPLE = json_grammar(
    {
        "type": "object",
        "required": ["people"],
        "additionalProperties": False,
        "properties": {"people": {"type": "array", "items": PERSON, "minItems": len(NAMES), "maxItems": len(NAMES)}},
    },
    field="schema",
)
Ask = Callable[[Engine], list[str]]


def _said(engine: Engine, turns: list[tuple[str, str]], tokens: int) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    return engine.chat(messages, temperature=0.0, max_tokens=tokens).text


def recall(engine: Engine) -> list[str]:
    chance = random.Random(1)
    facts = ", ".join(f"{name}: {chance.randrange(10_000, 99_999)}" for name in NAMES)
    return [
        _said(engine, [("user", facts), ("assistant", "Noted."), ("user", f"What is {name}'s number?")], 32)
        for name in NAMES
    ]


def story(engine: Engine) -> list[str]:
    return [_said(engine, [("user", f"Tell me a story about a {animal}.")], 160) for animal in ANIMALS]


def turns(engine: Engine) -> list[str]:
    chance, talk, answers = random.Random(2), [], []
    lines = [f"{name}: {chance.randrange(10_000, 99_999)}" for name in NAMES]
    for turn, name in enumerate(NAMES):
        lines[turn] = f"{name}: {chance.randrange(10_000, 99_999)}"
        talk.append(("user", f"List: {', '.join(lines)}. What is {name}'s number?"))
        answers.append(_said(engine, talk, 48))
        talk.append(("assistant", answers[-1]))
    return answers


def agent(engine: Engine) -> list[str]:
    chance, answers = random.Random(3), []
    people = [{"name": name, "city": "Rome", "code": chance.randrange(1000, 9999)} for name in NAMES]
    talk: list[dict[str, str]] = []
    for turn in range(6):
        people[turn]["code"] = chance.randrange(1000, 9999)
        rows = "\n".join(f"{one['name']}: city {one['city']}, code {one['code']}" for one in people)
        talk.append({"role": "user", "content": f"{rows}\n\nList the people as JSON."})
        answers.append(engine.chat(talk, temperature=0.0, max_tokens=400, grammar=PEOPLE).text)
        talk.append({"role": "assistant", "content": answers[-1]})
    return answers


def batch(engine: Engine) -> list[str]:
    prompts = [f"{number}. A story about a {ANIMALS[number % 8]}:" for number in range(32)]
    answers = engine.generate(prompts, temperature=0.0, max_tokens=64)
    return [answer.text for answer in answers]


WORKLOADS: dict[str, Ask] = {"recall": recall, "story": story, "turns": turns, "agent": agent, "batch": batch}


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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--only", choices=tuple(WORKLOADS))
    asked = parser.parse_args()
    engines = [Engine(asked.model, memory=asked.memory, speculate=speculate) for speculate in ("off", asked.speculate)]
    for name, ask in WORKLOADS.items():
        if asked.only not in (None, name):
            continue
        seconds: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        before = engines[1].stats()
        for number in range(1 + asked.rounds):
            texts = {}
            for at in (0, 1) if number % 2 else (1, 0):
                _forget(engines[at])
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                texts[at] = ask(engines[at])
                seconds[at].append(time.perf_counter() - began_s)
                cpu[at].append(time.process_time() - began_cpu_s)
            assert texts[0] == texts[1], "drafts changed an answer"
        after = engines[1].stats()
        accepted = after.speculation.accepted - before.speculation.accepted
        tokens = after.generation_tokens - before.generation_tokens
        off_s, on_s = (statistics.median(own[1:]) for own in seconds)
        off_cpu_s, on_cpu_s = (statistics.median(own[1:]) for own in cpu)
        print(
            f"{name:7} {off_s * 1e3:8.1f} ms off  {on_s * 1e3:8.1f} ms {asked.speculate}  "
            f"ratio {off_s / on_s:5.2f}  of CPU time {off_cpu_s / on_cpu_s:5.2f}  "
            f"{tokens / max(1, tokens - accepted):5.2f} a step",
            flush=True,
        )
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
