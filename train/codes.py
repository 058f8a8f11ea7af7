"""The codes task: a few coloured codes that change while the talk goes on, for models without attention.

A model with only recurrent layers cannot hold a list of eighty names. It can hold a handful of codes, and
it can overwrite one. Only its states can carry the answer across the text in between, so a lost, stale or
swapped state is a wrong answer.

    user       Red 71, Blue 29.              assistant  Noted.
    user       What is Red?                  assistant  Red 71
    user       Now Red 44.                   assistant  Noted.
    user       What is Red?                  assistant  Red 44

Colour and code stand side by side in the text and in the answer. A delta net sees four tokens at once
through its convolution, so it can write "what followed Red" under the key "Red"; with the colour at the
other end of a sentence a model this small learned to name the latest code and no more. Two digits, for
the same reason: at a third one the colour has left the window, and codes that begin alike are mixed up.

The colours are few and known, but the code of a colour must not be learned by heart. So each (colour,
code) pair belongs to one side by its checksum, as the words of `words.py` do. Training never sees a pair
that is scored.
"""

from __future__ import annotations

import random

from weft_tools.eval.recall import NOTED, TURN_OVERHEAD_TOKENS, CountTokens, Episode, EpisodeTurn
from weft_tools.eval.words import Split, filler_sentence, split_of

COLOURS = ["Red", "Blue", "Green", "Black", "White", "Yellow", "Purple", "Orange", "Brown", "Pink"]
COLOURS += ["Grey", "Silver"]
CODES_MAX = 6
CODE_DIGITS = 2

QUESTIONS = ("What is {colour}?", "And {colour}?", "{colour}?")


def make_code(rng: random.Random, colour: str, split: Split) -> str:
    """A code that this colour may have on this side of the split."""
    while True:
        code = "".join(rng.choice("0123456789") for _ in range(CODE_DIGITS))
        if split_of(f"{colour} {code}") == split:
            return code


def make_codes_episode(
    rng: random.Random,
    length_tokens: int,
    count_tokens: CountTokens,
    *,
    split: Split = "held_out",
    colours: int | None = None,
) -> Episode:
    """One conversation that fills `length_tokens` with questions, changes and a little other text."""
    chosen = rng.sample(COLOURS, colours or rng.randint(1, min(CODES_MAX, length_tokens // 32)))
    codes = {colour: make_code(rng, colour, split) for colour in chosen}
    initial_codes = ", ".join(f"{colour} {code}" for colour, code in codes.items())
    turns = [EpisodeTurn(f"{initial_codes}.", NOTED, "told")]
    room = length_tokens - count_tokens(turns[0].user) - count_tokens(NOTED) - TURN_OVERHEAD_TOKENS
    while True:
        chance = rng.random()
        colour = rng.choice(chosen)
        if chance < 0.76:
            question = rng.choice(QUESTIONS).format(colour=colour)
            turn = EpisodeTurn(question, f"{colour} {codes[colour]}", "recall")
        elif chance < 0.92:
            code = make_code(rng, colour, split)
            turn = EpisodeTurn(f"Now {colour} {code}.", NOTED, "told")
        else:
            turn = EpisodeTurn(filler_sentence(rng), NOTED, "told")
        room -= count_tokens(turn.user) + count_tokens(turn.reply) + TURN_OVERHEAD_TOKENS
        if room < 0 and any(earlier.kind == "recall" for earlier in turns):
            return Episode(None, tuple(turns), length_tokens, tuple(chosen))
        turns.append(turn)
        if turn.kind == "told" and turn.user.startswith("Now "):
            codes[colour] = code


def make_codes_episodes(
    seed: int, length_tokens: int, count: int, count_tokens: CountTokens, *, split: Split = "held_out"
) -> list[Episode]:
    """`count` conversations that depend on nothing but the arguments."""
    rng = random.Random(f"codes {split} {seed} {length_tokens}")
    return [make_codes_episode(rng, length_tokens, count_tokens, split=split) for _ in range(count)]
