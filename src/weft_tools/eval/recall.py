"""The recall task: a list of made-up names and numbers, other text, then questions about the list.

The conversations that `train/` learns from and that `weft eval recall` asks. One generator serves both, so
every scored form of question was also trained. The names of the two sides never meet (`words.py`).

    [system]                                     sometimes
    user       list, maybe with text in between, maybe with the first question
    assistant  Noted. (or the first answer)
    user       more of the list, or text         sometimes
    user       question            \\
    assistant  name: number        / until the length is full, or the questions are used up

The answer repeats the name ("Bemo: 4821"), so name and number are adjacent as they are in the list. A small model
learns this lookup far sooner than an answer with only the number (train/README.md).

A memory bug shows because the answer is four to six random digits that occur only once, far back: neither the weights
nor the text near the question help. Wrong KV, a page of another request or a lost page gives a wrong digit, and only
exact answers count.

The caller passes `count_tokens`, since the generator knows no tokenizer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from weft_tools.eval.words import Split, filler_sentence, make_name, make_number

TurnKind = Literal["recall", "absent", "told", "call", "answer", "no_tool", "json"]
CountTokens = Callable[[str], int]

SCORED: tuple[TurnKind, ...] = ("recall", "call", "answer", "no_tool", "json")
TURN_OVERHEAD_TOKENS = 10  # tokens of ChatML around one user message and one reply
PAIRS_MAX = 80
QUESTION_TOKENS = 30  # tokens of an average question with its answer, to plan with
LINE_TOKENS = 13
SHORT_TOKENS = 256  # tokens up to which filler is rare where questions fill the length: there is no room for both

NOTED = "Noted."

SYSTEMS = (
    "You are a helpful assistant.",
    "You answer questions about a list.",
    "Answer with the name and the number.",
    "You are a careful assistant with a good memory.",
    "Remember what the user tells you.",
)
NOUNS = ("number", "number", "number", "code", "extension", "badge number", "room number", "account")
INTROS = (
    "Here is a list of {noun}s:",
    "Please remember these {noun}s:",
    "Remember this list.",
    "These are the {noun}s:",
    "List of {noun}s:",
    "I will ask you about these {noun}s later.",
    "",
)
MORE_INTROS = ("Here are more {noun}s:", "And these:", "The list goes on:", "Add these to the list:")
LINES = (
    "{name}: {number}",
    "{name}: {number}",
    "{name}: {number}",
    "- {name}: {number}",
    "* {name}: {number}",
    "{name} = {number}",
    "{name} - {number}",
    "{name} {number}",
    "| {name} | {number} |",
    "{name} has the {noun} {number}.",
    "The {noun} of {name} is {number}.",
)
QUESTIONS = (
    "What is {name}'s {noun}?",
    "What is the {noun} of {name}?",
    "What is the {noun} for {name}?",
    "Which {noun} belongs to {name}?",
    "What {noun} does {name} have?",
    "Tell me the {noun} of {name}.",
    "Give me {name}'s {noun}, please.",
    "Do you remember the {noun} of {name}?",
    "I need the {noun} of {name}.",
    "Look up {name}.",
    "And {name}?",
    "{name}?",
    "Now {name}, please.",
)


@dataclass(frozen=True)
class EpisodeTurn:
    """One user message and the one right reply. Turns of the kinds in `SCORED` are scored.

    `free`: ranges of characters of the reply that the conversation does not determine. `schema`: the schema of a JSON
    answer.
    """

    user: str
    reply: str
    kind: TurnKind
    free: tuple[tuple[int, int], ...] = ()
    schema: dict[str, Any] | None = None

    def cost(self, count_tokens: CountTokens) -> int:
        """Return the number of tokens of the turn."""
        return count_tokens(self.user) + count_tokens(self.reply) + TURN_OVERHEAD_TOKENS


@dataclass(frozen=True)
class Episode:
    """A conversation whose prompt at its last question is close to `length_tokens` long.

    `names`: of the list.
    """

    system: str | None
    turns: tuple[EpisodeTurn, ...]
    length_tokens: int
    names: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def messages_before(self, turn_index: int, replies: list[str] | None = None) -> list[dict[str, str]]:
        """Return the chat messages that end with the user message of `turn_index`.

        `replies` are the model's own earlier answers; without them the right ones are used.
        """
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for index, turn in enumerate(self.turns[:turn_index]):
            messages.append({"role": "user", "content": turn.user})
            reply = turn.reply if replies is None else replies[index]
            messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": self.turns[turn_index].user})
        return messages


def answer_for(name: str, number: str) -> str:
    """Return the one right answer to a question about `name`."""
    return f"{name}: {number}"


def is_right(answer: str, expected: str) -> bool:
    """Return whether the answer matches exactly; only white space around it is forgiven."""
    return answer.strip() == expected


@dataclass
class _Draft:
    """A conversation that is being written, and the number of tokens left."""

    rng: random.Random
    split: Split
    count_tokens: CountTokens
    room_tokens: int
    noun: str
    line: str
    turns: list[EpisodeTurn]

    def add(self, user: str, reply: str, kind: TurnKind) -> None:
        self.turns.append(EpisodeTurn(user, reply, kind))
        self.room_tokens -= self.turns[-1].cost(self.count_tokens)

    def sentences(self, tokens: int) -> list[str]:
        """Return filler of about `tokens` tokens."""
        written: list[str] = []
        while tokens > 0:
            sentence = filler_sentence(self.rng)
            tokens -= self.count_tokens(sentence) + 1
            if tokens >= 0 or not written:
                written.append(sentence)
        return written

    def question(self, name: str) -> str:
        return self.rng.choice(QUESTIONS).format(name=name, noun=self.noun)


def _list_text(draft: _Draft, intro: str, pairs: list[tuple[str, str]], filler: list[str]) -> str:
    """Return the list as one message; `filler` goes between the lines, or after them."""
    rng = draft.rng
    lines = [draft.line.format(name=name, number=number, noun=draft.noun) for name, number in pairs]
    if filler and rng.random() < 0.5:
        for sentence in filler:
            lines.insert(rng.randint(0, len(lines)), sentence)
        filler = []
    separator = ", " if not filler and "." not in lines[0] and rng.random() < 0.08 else "\n"
    text = separator.join(lines)
    if intro:
        text = f"{intro.format(noun=draft.noun)}\n{text}"
    if filler:
        text = f"{text}\n\n{' '.join(filler)}"
    return text


def _make_pairs(draft: _Draft, count: int) -> list[tuple[str, str]]:
    numbers: dict[str, str] = {}
    used: set[str] = set()
    while len(numbers) < count:
        name = make_name(draft.rng, draft.split, numbers)
        numbers[name] = make_number(draft.rng, used)
        used.add(numbers[name])
    return list(numbers.items())


def _pairs_count(rng: random.Random, list_room_tokens: int, *, prefer_long: bool) -> int:
    """Return a log-uniform number of pairs, so that short lists in long texts are as common as long lists.

    `prefer_long` prefers long lists, which teach more: a short list can be guessed.
    """
    most = max(2, min(PAIRS_MAX, list_room_tokens // LINE_TOKENS))
    chance = rng.random()
    return round(2 * math.pow(most / 2, math.sqrt(chance) if prefer_long else chance))


def _write_list(draft: _Draft, pairs: list[tuple[str, str]], filler_tokens: int, *, may_ask: bool) -> int:
    """Write the list in one turn or two; return the filler tokens left for later turns.

    With `may_ask` the first question sometimes comes in the same message as the list.
    """
    rng = draft.rng
    parts = [pairs]
    if len(pairs) >= 4 and rng.random() < 0.2:
        cut = rng.randint(1, len(pairs) - 1)
        parts = [pairs[:cut], pairs[cut:]]
    for index, part in enumerate(parts):
        here = int(filler_tokens * rng.choice((0.0, 0.5, 1.0))) if filler_tokens > 12 else 0
        filler_tokens -= here
        intro = rng.choice(MORE_INTROS if index else INTROS)
        text = _list_text(draft, intro, part, draft.sentences(here) if here else [])
        if index == len(parts) - 1 and rng.random() < 0.3 and may_ask:
            name, number = rng.choice(pairs)
            draft.add(f"{text}\n\n{draft.question(name)}", answer_for(name, number), "recall")
        else:
            draft.add(text, NOTED, "told")
    return filler_tokens


def _write_questions(
    draft: _Draft, pairs: list[tuple[str, str]], filler_tokens: int, questions: int | None, absent_rate: float
) -> None:
    """Write questions until the room or the questions are used up, with the remaining filler between them."""
    rng = draft.rng
    names = dict(pairs)
    last = ""
    written = sum(turn.kind == "recall" for turn in draft.turns)
    while questions is None or written < questions:
        is_last = questions is not None and written == questions - 1
        if filler_tokens > 12 and (is_last or rng.random() < 0.5):
            here = filler_tokens if is_last or rng.random() < 0.4 else rng.randint(12, filler_tokens)
            draft.add(" ".join(draft.sentences(here)), NOTED, "told")
            filler_tokens -= here
            continue
        kind: TurnKind = "absent" if rng.random() < absent_rate else "recall"
        if kind == "absent":
            name = make_name(rng, draft.split, names)
            user, reply = draft.question(name), f"{name} is not in the list."
        else:
            # Drawn at random each time: in order, the last answers could be found by elimination.
            name, number = rng.choice([pair for pair in pairs if pair[0] != last])
            last = name
            user, reply = draft.question(name), answer_for(name, number)
        cost = draft.count_tokens(user) + draft.count_tokens(reply) + TURN_OVERHEAD_TOKENS
        if cost > draft.room_tokens and written:
            return
        draft.add(user, reply, kind)
        written += 1


def make_episode(
    rng: random.Random,
    length_tokens: int,
    count_tokens: CountTokens,
    *,
    split: Split = "held_out",
    questions: int | None = None,
    absent_rate: float = 0.0,
) -> Episode:
    """Return one conversation. With `questions` the filler fills the length, without it the questions do."""
    system = rng.choice(SYSTEMS) if rng.random() < 0.3 else None
    room = length_tokens - (count_tokens(system) + 5 if system else 0)
    draft = _Draft(rng, split, count_tokens, room, rng.choice(NOUNS), rng.choice(LINES), [])
    if questions is None:
        plain = rng.random() < (0.8 if length_tokens <= SHORT_TOKENS else 0.4)
        filler_tokens = 0 if plain else int(room * rng.uniform(0.05, 0.75))
        list_room = int((room - filler_tokens) * rng.uniform(0.2, 0.5))
    else:
        questions = max(1, min(questions, int(0.45 * length_tokens) // QUESTION_TOKENS))
        list_room = room - questions * QUESTION_TOKENS - 2 * TURN_OVERHEAD_TOKENS
        filler_tokens = 0
    entries = _make_pairs(draft, _pairs_count(rng, list_room, prefer_long=questions is None))
    if questions is not None:
        line_tokens = sum(
            count_tokens(draft.line.format(name=name, number=number, noun=draft.noun)) + 1 for name, number in entries
        )
        filler_tokens = max(0, list_room - line_tokens)
    filler_tokens = _write_list(draft, entries, filler_tokens, may_ask=questions != 1)
    _write_questions(draft, entries, filler_tokens, questions, absent_rate)
    return Episode(system, tuple(draft.turns), length_tokens, tuple(name for name, _ in entries))


def make_episodes(
    seed: int,
    length_tokens: int,
    count: int,
    count_tokens: CountTokens,
    *,
    split: Split = "held_out",
    questions: int | None = 8,
) -> list[Episode]:
    """Return `count` conversations that depend only on the arguments."""
    rng = random.Random(f"recall {split} {seed} {length_tokens}")
    return [make_episode(rng, length_tokens, count_tokens, split=split, questions=questions) for _ in range(count)]
