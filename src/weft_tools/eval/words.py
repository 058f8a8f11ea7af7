"""Made-up names, the rule that keeps names of tests out of training, and plain English filler.

    crc32("bemo") % 8 == 0  ->  held out, scoring only      (about one word in eight)
    anything else           ->  training only

A recall test is valid only if the answer cannot come from the weights. So names are made of random syllables, or of
random letters. The checksum of every *word* of a name says to which side it belongs. The two cannot meet under any
seeds. Numbers are not split: four to six random digits carry nothing that could be learned by heart.

Filler must look like text, be cheap to generate, and never contain a number that could be an answer.
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
    """Return the side a word belongs to; upper and lower case are the same word."""
    held_out = zlib.crc32(word.lower().encode()) % HELD_OUT_ONE_IN == 0
    return "held_out" if held_out else "training"


def _any_word(rng: random.Random) -> str:
    if rng.random() < 0.12:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 6))).capitalize()
    syllables = rng.choice((2, 2, 2, 3, 3))
    body = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables))
    return (body + rng.choice(CODAS)).capitalize()


def make_word(rng: random.Random, split: Split) -> str:
    """Return one made-up capitalised word of the given side."""
    while True:
        word = _any_word(rng)
        if split_of(word) == split:
            return word


def make_name(rng: random.Random, split: Split, excluded: Container[str] = ()) -> str:
    """Return a name of one or two words that is not in `excluded`."""
    while True:
        name = make_word(rng, split)
        if rng.random() < 0.3:
            name = f"{name} {make_word(rng, split)}"
        if name not in excluded:
            return name


def make_number(rng: random.Random, excluded: Container[str] = ()) -> str:
    """Return four to six digits, the first one not zero, not in `excluded`."""
    while True:
        digits = rng.randint(4, 6)
        number = str(rng.randrange(10 ** (digits - 1), 10**digits))
        if number not in excluded:
            return number


ADJECTIVES = ["grey", "small", "quiet", "bright", "green", "blue", "brave", "tired", "happy", "clever"]
ADJECTIVES += ["young", "gentle", "lazy", "curious"]
ANIMALS = ["fox", "owl", "bear", "cat", "dog", "hare", "mouse", "goose", "horse", "crow", "otter"]
ANIMALS += ["hedgehog", "frog", "wolf"]
PLACES = (
    "by the river", "near the old mill", "on a high hill", "at the edge of the forest", "behind the garden",
    "close to the harbour", "in a quiet valley", "under the stone bridge", "next to the market",
)  # fmt: skip
THINGS = ["lamp", "key", "boat", "book", "bell", "kite", "drum", "map", "basket", "ladder", "mirror"]
THINGS += ["blanket"]
FOODS = ["bread", "soup", "honey", "cheese", "cake", "rice", "tea", "jam"]
WEATHERS = (
    "The wind was cold", "It rained all day", "The sun was shining", "Snow lay on the roofs",
    "A thick fog came in", "The sky was clear",
)  # fmt: skip
PEOPLE = ["the baker", "the teacher", "the farmer", "the captain", "the gardener", "the carpenter"]
PEOPLE += ["the postman", "the painter"]
VERBS = ["carried", "opened", "cleaned", "repaired", "painted", "found", "lost", "sold", "borrowed"]
VERBS += ["moved", "washed", "counted"]
TIMES = (
    "in the morning", "after lunch", "before dinner", "late at night", "during the week",
    "at the end of the day", "on the way home",
)  # fmt: skip
FEELINGS = ["glad", "proud", "calm", "surprised", "hungry", "sleepy", "cheerful"]


def filler_sentence(rng: random.Random) -> str:
    """Return a filler sentence, without digits and made-up names."""
    form = rng.randrange(6)
    if form == 0:
        return f"{rng.choice(WEATHERS)} {rng.choice(TIMES)}."
    if form == 1:
        who, did, what = rng.choice(PEOPLE), rng.choice(VERBS), rng.choice(THINGS)
        return f"{who.capitalize()} {did} the {what} {rng.choice(TIMES)}."
    if form == 2:
        return f"A {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} lived {rng.choice(PLACES)}."
    if form == 3:
        return f"There was {rng.choice(FOODS)} for everyone {rng.choice(TIMES)}."
    if form == 4:
        return f"The {rng.choice(ADJECTIVES)} {rng.choice(THINGS)} was {rng.choice(PLACES)}."
    return f"{rng.choice(PEOPLE).capitalize()} felt {rng.choice(FEELINGS)} {rng.choice(TIMES)}."
