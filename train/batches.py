"""Turns conversations into rows of tokens with a weight for each token that is to be predicted.

A row is one conversation of the wanted length, or several short ones one after the other; every token
is predicted, replies with weight 1, the rest with a tenth of that (it teaches the language, but it is
mostly random names). Stories count a third: half of their words are free choices.

Row number n of a seed is always the same row, so a run can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from train.chat import SYSTEM, in_second_words, small_talk, story_turn, talk_beside_tools, unknown_turn
from train.codes import make_codes_episode
from train.invented import invented_turn
from train.tokenizer import END_OF_TEXT, TURN_END, TURN_START
from weft_tools.eval.facts import make_facts_episode
from weft_tools.eval.recall import SCORED, CountTokens, Episode, EpisodeTurn, make_episode
from weft_tools.eval.tool_calls import make_tools_episode, system_text

PROMPT_WEIGHT, STORY_WEIGHT, FREE_WEIGHT, END_WEIGHT = 0.1, 0.3, 0.2, 0.99
STORY_CHARACTERS_MIN = 200

MakeEpisode = Callable[[random.Random, int, CountTokens], Episode]


@dataclass(frozen=True)
class Batch:
    """`answers` numbers the scored answers: -1 for tokens that belong to none."""

    tokens_BL: Tensor
    targets_BL: Tensor
    weights_BL: Tensor
    answers_BL: Tensor


class Chats:
    """Encodes ChatML exactly as the chat template renders it."""

    def __init__(self, tokenizer: Tokenizer, *, ends_weigh: bool = False) -> None:
        self.tokenizer, self.ends_weigh = tokenizer, ends_weigh
        self.start, self.end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
        self.end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        self.newline = self.encode("\n")
        self.reply_head = [self.start, *self.encode("assistant\n")]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def rows(self, episode: Episode) -> tuple[list[int], list[float], list[int]]:
        """Tokens, their weights, and the number of the scored answer that each belongs to (or -1)."""
        tokens: list[int] = []
        weights: list[float] = []
        answers: list[int] = []

        def add(ids: list[int], weight: float, answer: int = -1) -> None:
            tokens.extend(ids)
            weights.extend([weight] * len(ids))
            answers.extend([answer] * len(ids))

        system = system_text(episode.system, episode.tools) if episode.tools else episode.system
        if system:
            add([self.start, *self.encode("system\n" + system), self.end, *self.newline], PROMPT_WEIGHT)
        asked = 0
        for turn in episode.turns:
            add([self.start, *self.encode("user\n" + turn.user), self.end, *self.newline], PROMPT_WEIGHT)
            add(self.reply_head, PROMPT_WEIGHT)
            is_story = turn.kind == "told" and len(turn.reply) > STORY_CHARACTERS_MIN
            weight = STORY_WEIGHT if is_story else 1.0
            answer = asked if turn.kind in SCORED else -1
            for token, factor in self.weighed(turn):
                add([token], weight * factor, answer if factor == 1.0 else -1)
            add(self.newline, PROMPT_WEIGHT)
            asked += turn.kind in SCORED
        return tokens, weights, answers

    def weighed(self, turn: EpisodeTurn) -> list[tuple[int, float]]:
        """The tokens of the reply and its end; what is free in it weighs little, a free beginning nothing.

        So a model learns to go on with JSON that a grammar has begun, and not to begin it unasked. With
        `ends_weigh` a token that ends a value has full weight, although what follows in the token is free.
        """
        encoded = self.tokenizer.encode(turn.reply, add_special_tokens=False)
        weighed = []
        for token, (first, last) in zip(encoded.ids, encoded.offsets, strict=True):
            free = any(first < end and start < last for start, end in turn.free)
            weight = 1.0 if not free else FREE_WEIGHT if first else 0.0
            if self.ends_weigh and free and first and turn.reply[first] == '"' and last > first + 1:
                weight = END_WEIGHT
            weighed.append((token, weight))
        return [*weighed, (self.end, 1.0)]


def wide_episode(rng: random.Random, length_tokens: int, count_tokens: CountTokens) -> Episode:
    """What the embedded model learns from: mostly recall, some talk and some stories."""
    chance = rng.random()
    if chance < 0.05:
        turns = [rng.choice((small_talk, story_turn, small_talk))(rng) for _ in range(rng.randint(1, 3))]
        return Episode(None, tuple(turns), length_tokens, ())
    if chance < 0.09:
        short = min(length_tokens, rng.choice((64, 96, 128, 192)))
        return make_episode(rng, short, count_tokens, split="training", absent_rate=0.3)
    extra: list[EpisodeTurn] = []
    if chance < 0.24 and length_tokens >= 256:
        extra = [small_talk(rng)]
        if rng.random() < 0.2 and length_tokens >= 512:
            extra.append(story_turn(rng))
    room = length_tokens - sum(count_tokens(turn.user) + count_tokens(turn.reply) + 10 for turn in extra)
    episode = make_episode(rng, room, count_tokens, split="training", absent_rate=0.06)
    turns = list(episode.turns)
    for turn in extra:
        turns.insert(rng.choice((0, rng.randint(0, len(turns)))), turn)
    return Episode(episode.system, tuple(turns), length_tokens, episode.names)


def skills_episode(rng: random.Random, length_tokens: int, count_tokens: CountTokens) -> Episode:
    """What the second stage learns from: recall as before, tools, JSON over facts, and talk."""
    chance = rng.random()
    room = min(length_tokens, int(96 * 8 ** rng.random()))
    if chance < 0.4:
        return in_second_words(wide_episode(rng, length_tokens, count_tokens))
    if chance < 0.74 and length_tokens >= 160:
        episode = make_tools_episode(rng, max(room, 160), count_tokens, split="training", talk=talk_beside_tools)
        return in_second_words(episode)
    if chance < 0.92:
        return make_facts_episode(rng, room, count_tokens, split="training")
    if chance < 0.96:
        asked = rng.choice((small_talk, unknown_turn))(rng).user if rng.random() < 0.3 else None
        turns = [invented_turn(rng, asked) for _ in range(rng.randint(1, 3))]
        return Episode(rng.choice((None, None, SYSTEM)), tuple(turns), length_tokens, ())
    turns = [rng.choice((small_talk, unknown_turn, story_turn))(rng) for _ in range(rng.randint(1, 3))]
    return in_second_words(Episode(rng.choice((None, None, SYSTEM)), tuple(turns), length_tokens, ()))


def ends_episode(rng: random.Random, length_tokens: int, count_tokens: CountTokens) -> Episode:
    """What the third stage learns from: the mix of the second, with more answers that no fact decides."""
    if rng.random() < 0.15:
        asked = rng.choice((small_talk, unknown_turn))(rng).user if rng.random() < 0.4 else None
        turns = [invented_turn(rng, asked if number == 0 else None) for number in range(rng.randint(1, 3))]
        return Episode(rng.choice((None, None, SYSTEM)), tuple(turns), length_tokens, ())
    return skills_episode(rng, length_tokens, count_tokens)


def codes_episode(rng: random.Random, length_tokens: int, count_tokens: CountTokens) -> Episode:
    return make_codes_episode(rng, length_tokens, count_tokens, split="training")


def make_batch(chats: Chats, make: MakeEpisode, rng: random.Random, rows: int, length: int) -> Batch:
    """`rows` rows of `length` tokens; what a conversation leaves free the next one takes."""
    all_rows: list[tuple[list[int], list[float], list[int]]] = []
    answers_before = 0
    for _ in range(rows):
        tokens, weights, answers = [], [], []
        while len(tokens) <= length:
            left = length + 1 - len(tokens)
            if tokens and left < 48:
                tokens += [chats.end_of_text] * left
                weights += [0.0] * left
                answers += [-1] * left
                break
            more, more_weights, more_answers = chats.rows(make(rng, left, chats.count))
            tokens += more
            weights += more_weights
            answers += [answer if answer < 0 else answer + answers_before for answer in more_answers]
            answers_before += max(more_answers, default=-1) + 1
        all_rows.append((tokens[: length + 1], weights[: length + 1], answers[: length + 1]))
    tokens_BL, weights_BL, answers_BL = (torch.tensor([row[part] for row in all_rows]) for part in range(3))
    return Batch(tokens_BL[:, :-1], tokens_BL[:, 1:], weights_BL[:, 1:], answers_BL[:, 1:])


def exact_match(predicted: Tensor, targets: Tensor, answers: Tensor) -> tuple[int, int]:
    """(right, asked): an answer is right when all of its tokens are, its end included."""
    inside = answers >= 0
    if not bool(inside.any()):
        return 0, 0
    numbers, index = answers[inside].unique(return_inverse=True)
    right = torch.ones(len(numbers), dtype=torch.int64)
    right.scatter_reduce_(0, index, (predicted == targets)[inside].long(), "amin")
    return int(right.sum()), len(numbers)
