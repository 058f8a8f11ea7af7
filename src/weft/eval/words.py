"""Made-up names, and the rule that keeps the names of a test out of training.

A recall test is honest only when the answer cannot come from the weights. So names are made of random
syllables (or of random letters), and every *word* of a name belongs to exactly one side: the checksum
of the word says which. Training draws from one side, scoring from the other, and the two cannot meet
under any seeds.

Rejected: a split by seed alone, since two seeds may draw the same name without a sign.

    crc32("bemo") % 8 == 0  ->  held out, scoring only      (about one word in eight)
    anything else           ->  training only

Numbers are not split: four to six random digits carry nothing that could be learned by heart.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Container
from typing import Literal

Split = Literal["training", "held_out"]

HELD_OUT_ONE_IN = 8

ONSETS = [
    *("b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z"),
    *("br", "dr", "gr", "kr", "tr", "pl", "sl", "fl", "sh", "ch", "th", "st"),
]
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ee", "ou", "ia"]
CODAS = [""] * 8 + ["n", "r", "l", "s", "m", "k", "t", "x", "nd", "rt", "ll", "ck"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def split_of(word: str) -> Split:
    """The side a word belongs to; upper and lower case are the same word."""
    held_out = zlib.crc32(word.lower().encode()) % HELD_OUT_ONE_IN == 0
    return "held_out" if held_out else "training"


def _any_word(rng: random.Random) -> str:
    if rng.random() < 0.12:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 6))).capitalize()
    syllables = rng.choice((2, 2, 2, 3, 3))
    body = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables))
    return (body + rng.choice(CODAS)).capitalize()


def make_word(rng: random.Random, split: Split) -> str:
    """One made-up capitalised word of the given side."""
    while True:
        word = _any_word(rng)
        if split_of(word) == split:
            return word


def make_name(rng: random.Random, split: Split, excluded: Container[str] = ()) -> str:
    """A name of one or two words that is not in `excluded`."""
    while True:
        name = make_word(rng, split)
        if rng.random() < 0.3:
            name = f"{name} {make_word(rng, split)}"
        if name not in excluded:
            return name


def make_number(rng: random.Random, excluded: Container[str] = ()) -> str:
    """Four to six digits, the first one not zero, not in `excluded`."""
    while True:
        digits = rng.randint(4, 6)
        number = str(rng.randrange(10 ** (digits - 1), 10**digits))
        if number not in excluded:
            return number
