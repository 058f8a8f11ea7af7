"""Scores the tools task and the JSON task through the HTTP API.

    tools   the request has the tools of the conversation; `tool_calls` of the answer are compared as values
    json    the request has `response_format` with a schema; the answer is parsed and compared as a value

Each scored turn is asked after the right earlier turns, because a wrong call would make the result behind it
nonsense. Decoding is greedy, and the model is free to call or not (`tool_choice` "auto").

Controls, the same questions without what decides the answer: tools of another conversation, facts of another
conversation. A score means something only where theirs is near zero.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import httpx

from weft.eval.facts import FORMS, make_facts_episodes
from weft.eval.recall import SCORED, CountTokens, Episode, EpisodeTurn
from weft.eval.score import CHARACTERS_PER_TOKEN, REQUEST_SECONDS_MAX, Progress, server_root
from weft.eval.tool_calls import chat_messages, make_tools_episodes, read_calls

Skill = Literal["tools", "json"]
SKILL_LENGTHS = (256, 512)
ANSWER_TOKENS_MAX = 256
CONTROLS: dict[Skill, str] = {"tools": "tools of another chat", "json": "facts of another chat"}


@dataclass(frozen=True)
class SkillQuestion:
    """One scored turn. `case` is its row in the table."""

    case: str
    episode: Episode
    turn_index: int

    @property
    def turn(self) -> EpisodeTurn:
        return self.episode.turns[self.turn_index]

    def body(self, model: str | None) -> dict[str, Any]:
        """The request for this turn."""
        body: dict[str, Any] = {"messages": chat_messages(self.episode, self.turn_index), "temperature": 0,
                                "max_tokens": ANSWER_TOKENS_MAX}
        if model is not None:
            body["model"] = model
        if self.episode.tools:
            body["tools"] = list(self.episode.tools)
        if self.turn.schema is not None:
            wanted = {"name": "answer", "schema": self.turn.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return body

    def is_right(self, message: dict[str, Any]) -> bool:
        """Whether the answer has the right calls, the right value, or exactly the right text."""
        content = (message.get("content") or "").strip()
        if self.turn.kind == "json":
            return bool(_parsed(content) == json.loads(self.turn.reply))
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if self.turn.kind == "call":
            called = [{"name": call["name"], "arguments": _parsed(call["arguments"])} for call in calls]
            return called == read_calls(self.turn.reply)
        return not calls and content == self.turn.reply


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@dataclass
class SkillRow:
    case: str
    asked: int = 0
    right: int = 0

    @property
    def accuracy(self) -> float:
        return self.right / self.asked if self.asked else 0.0


@dataclass
class SkillReport:
    """Rows by kind of question; `controls` are counted apart."""

    rows: list[SkillRow] = field(default_factory=list)
    controls: list[SkillRow] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        asked = sum(row.asked for row in self.rows)
        return sum(row.right for row in self.rows) / asked if asked else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"accuracy": self.accuracy}

    def as_table(self) -> str:
        lines = [f"{'case':32}  asked   right   accuracy"]
        for row in [*self.rows, *self.controls]:
            lines.append(f"{row.case:32} {row.asked:6}  {row.right:6}  {row.accuracy:9.2%}")
        return "\n".join(lines)


def _characters(text: str) -> int:
    return int(len(text) / CHARACTERS_PER_TOKEN) + 1


def _tools_case(episode: Episode, turn: EpisodeTurn) -> str:
    if turn.kind != "call":
        return {"answer": "answer from a result", "no_tool": "no tool fits"}.get(turn.kind, turn.kind)
    calls = read_calls(turn.reply)
    if len(calls) > 1:
        return "two calls"
    from_list = any(name in episode.names for name in calls[0]["arguments"].values())
    return "call, argument from a list" if from_list else "call"


def make_questions(
    skill: Skill, seed: int, length: int, count: int, count_tokens: CountTokens = _characters
) -> list[SkillQuestion]:
    """At least `count` questions, of whole conversations."""
    return list(_enough(_questions(skill, seed, length, count, count_tokens), count))


def _questions(
    skill: Skill, seed: int, length: int, count: int, count_tokens: CountTokens
) -> Iterator[list[SkillQuestion]]:
    if skill == "tools":
        for episode in make_tools_episodes(seed, length, count, count_tokens):
            yield [SkillQuestion(_tools_case(episode, turn), episode, index)
                   for index, turn in enumerate(episode.turns) if turn.kind in SCORED]
        return
    forms = list(dict.fromkeys(FORMS))
    by_form = [make_facts_episodes(seed, length, count, count_tokens, form=form) for form in forms]
    for episodes in zip(*by_form, strict=True):
        for form, episode in zip(forms, episodes, strict=True):
            yield [SkillQuestion(f"facts as {form}", episode, index)
                   for index, turn in enumerate(episode.turns) if turn.kind == "json"]


def _enough(conversations: Iterator[list[SkillQuestion]], count: int) -> Iterator[SkillQuestion]:
    for questions in conversations:
        if count <= 0:
            return
        count -= len(questions)
        yield from questions


def control_questions(skill: Skill, questions: Sequence[SkillQuestion]) -> list[SkillQuestion]:
    """The same questions with the tools, or with the facts, of the next conversation."""
    episodes = list({id(question.episode): question.episode for question in questions}.values())
    following = {id(episode): episodes[index - 1] for index, episode in enumerate(episodes)}
    controls = []
    for question in questions:
        episode, other = question.episode, following[id(question.episode)]
        if skill == "tools" and question.turn.kind == "call":
            spoilt = replace(episode, tools=other.tools)
        elif skill == "json" and question.turn_index:
            first = replace(episode.turns[0], user=other.turns[0].user, reply=other.turns[0].reply)
            spoilt = replace(episode, turns=(first, question.turn))
        else:
            continue
        index = question.turn_index if skill == "tools" else 1
        controls.append(SkillQuestion(CONTROLS[skill], spoilt, index))
    return controls


async def score_skill(
    base_url: str,
    model: str | None,
    skill: Skill,
    *,
    api_key: str | None = None,
    lengths: Sequence[int] = SKILL_LENGTHS,
    questions_per_length: int = 100,
    controls: bool = False,
    concurrency: int = 8,
    seed: int = 1,
    on_progress: Progress | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> SkillReport:
    """Asks every question, at most `concurrency` at once; `on_progress` gets (answered, planned)."""
    questions = [
        question
        for length in lengths
        for question in make_questions(skill, seed, length, questions_per_length)
    ]
    spoilt = control_questions(skill, questions) if controls else []
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    report, at_once, answered = SkillReport(), asyncio.Semaphore(concurrency), 0
    async with httpx.AsyncClient(
        base_url=server_root(base_url), headers=headers, timeout=REQUEST_SECONDS_MAX, transport=transport
    ) as client:

        async def ask(question: SkillQuestion, row: SkillRow) -> None:
            nonlocal answered
            async with at_once:
                response = await client.post("/v1/chat/completions", json=question.body(model))
            response.raise_for_status()
            row.asked += 1
            row.right += question.is_right(response.json()["choices"][0]["message"])
            answered += 1
            if on_progress is not None:
                on_progress(answered, len(questions) + len(spoilt))

        async with asyncio.TaskGroup() as group:
            for rows, asked in ((report.rows, questions), (report.controls, spoilt)):
                row_of: dict[str, SkillRow] = {}
                for question in asked:
                    row = row_of.setdefault(question.case, SkillRow(question.case))
                    group.create_task(ask(question, row))
                rows += row_of.values()
    return report


