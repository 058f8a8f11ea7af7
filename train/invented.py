"""Questions that no fact decides ("Invent a person."): only the form of the answer is learned."""

from __future__ import annotations

import random
from typing import Any

from weft_tools.eval.facts import COLOURS, COLUMNS, JOBS, WHOLE_NUMBERS, Record, write_json
from weft_tools.eval.recall import EpisodeTurn
from weft_tools.eval.tool_calls import NUMBER_KEYS, OTHER_KEYS, REAL_NAMES, SUBJECT_KEYS, TEXT_KEYS
from weft_tools.eval.words import ADJECTIVES, ANIMALS, FOODS, THINGS, filler_sentence, make_name, make_word

INVENT = (
    "Invent somebody.", "Invent a person.", "Invent something.", "Make up a person.", "Give me an example.",
    "Make one up.", "Any person.", "Create a user.", "Give me a random person.", "Somebody new, please.",
    "Invent an animal.", "Make up a product.", "Describe a book.", "Generate an example.", "Surprise me.",
)  # fmt: skip


def _any_value(rng: random.Random, key: str, depth: int) -> Any:
    chance = rng.random()
    if key in ("name", "person", "city", "country", "title", "summary", "description"):
        return _any_text(rng, key)
    if key in WHOLE_NUMBERS or key in NUMBER_KEYS or chance < 0.12:
        return rng.randint(*WHOLE_NUMBERS.get(key, (0, 1000)))
    if chance < 0.18:
        return rng.randrange(1, 1000) / 10
    if chance < 0.26:
        return rng.random() < 0.5
    if chance < 0.36 and depth < 2:
        if rng.random() < 0.25:
            return [rng.randint(0, 1000) for _ in range(rng.randint(1, 4))]
        return [_any_text(rng, "tag") for _ in range(rng.randint(1, 4))]
    if chance < 0.42 and depth < 2:
        return _any_object(rng, depth + 1)
    return _any_text(rng, key)


def _any_text(rng: random.Random, key: str) -> str:
    chance = rng.random()
    if key in (*TEXT_KEYS, "description", "summary", "answer") and chance < 0.6:
        return filler_sentence(rng)
    if key in ("name", "city", "person", "country") or chance < 0.5:
        return rng.choice(REAL_NAMES) if rng.random() < 0.3 else make_name(rng, "training")
    return rng.choice([*THINGS, *FOODS, *ADJECTIVES, *ANIMALS, *COLOURS, *JOBS])


def _any_object(rng: random.Random, depth: int = 0) -> Record:
    keys = [*SUBJECT_KEYS, *NUMBER_KEYS, *OTHER_KEYS, *TEXT_KEYS, *COLUMNS, "description", "summary",
            "answer", "tags", "items", "active", "kind"]  # fmt: skip
    chosen = [rng.choice(keys) for _ in range(rng.randint(1, 4 - depth))]
    if rng.random() < 0.3 and not depth:
        chosen = ["name", rng.choice(("age", "age", "city", "job")), *chosen[:1]]
    chosen = [make_word(rng, "training").lower() if rng.random() < 0.1 else key for key in chosen]
    return {key: _any_value(rng, key, depth) for key in dict.fromkeys(chosen)}


def invented_turn(rng: random.Random, asked: str | None = None) -> EpisodeTurn:
    """A question without facts; only the form of the answer can be learned."""
    text = asked or rng.choice(INVENT)
    in_json = asked is None and rng.random() < 0.3
    text = f"{text} Answer in JSON." if in_json else text
    reply = write_json(_any_object(rng), keys_known=False, opening_known=in_json, values_known=False)
    return EpisodeTurn(text, reply.text, "told", reply.free, reply.schema)
