"""Texts to speculate on: token ids of a skewed vocabulary, and edited copies."""

from __future__ import annotations

import random

VOCABULARY = 5000


def prose(seed: int, length: int) -> list[int]:
    """Tokens without structure, the frequent ones far more frequent."""
    chance = random.Random(seed)
    return [int(chance.paretovariate(0.6)) % VOCABULARY for _ in range(length)]


def edited(text: list[int], share: float, seed: int) -> list[int]:
    """``text`` with an edit at ``share`` of its places: tokens replaced, added or removed."""
    chance = random.Random(seed)
    result: list[int] = []
    at = 0
    while at < len(text):
        if chance.random() >= share:
            result.append(text[at])
            at += 1
            continue
        if chance.random() < 2 / 3:
            result += [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 4))]
        at += chance.randint(0, 4)
    return result
