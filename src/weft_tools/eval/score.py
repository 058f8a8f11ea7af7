"""Scores the recall task, the tools task and the JSON task through the HTTP API, as a client that knows
nothing of the engine would.

    recall  conversations: ask, append the model's *own* answer, ask the next
    tools   the request has the tools of the conversation; `tool_calls` of the answer are compared as values
    json    the request has `response_format` with a schema; the answer is parsed and compared as a value

In recall a wrong answer stays in the context, as it would for a user. The prompt of a later question extends
the prompt of the earlier one, so the score covers prefix hits, carried states and reused pages. Lengths are
fitted to the counts of the server's `/tokenize`. For a server without it they are estimated from characters.

In the other tasks each scored turn is asked after the right earlier turns, because a wrong call would make the
following result nonsense. Controls are the same questions with tools, or facts, of another conversation. A score is
meaningful only if the score of the controls is near zero.

Decoding is greedy, so a score measures the server and not luck. A bounded number of requests runs at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import httpx

from weft_tools.eval.facts import FORMS, make_facts_episodes
from weft_tools.eval.recall import SCORED, Episode, EpisodeTurn, is_right, make_episodes
from weft_tools.eval.tool_calls import chat_messages, make_tools_episodes, read_calls

LENGTHS = (128, 256, 512, 1024, 2048)
QUESTIONS_PER_EPISODE = 8
ANSWER_TOKENS_MAX = 48
CHARACTERS_PER_TOKEN = 3.0
FITTING_ROUNDS, FITTING_SAMPLE = 4, 6
REQUEST_SECONDS_MAX = 600.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RecallRow:
    """The result at one length; `tokens_prompt_median` is the server's count, not the requested length."""

    length: int
    questions: int
    right: int
    accuracy: float
    tokens_prompt_median: int


def _row_json(row: RecallRow | SkillRow) -> dict[str, Any]:
    """Return the fields of a row for JSON, where the number of questions is called ``asked``."""
    return {"asked" if name == "questions" else name: value for name, value in asdict(row).items()}


@dataclass(frozen=True)
class RecallReport:
    rows: tuple[RecallRow, ...]

    @property
    def questions(self) -> int:
        return sum(row.questions for row in self.rows)

    @property
    def right(self) -> int:
        return sum(row.right for row in self.rows)

    @property
    def accuracy(self) -> float:
        return self.right / self.questions if self.questions else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [_row_json(row) for row in self.rows],
            "asked": self.questions,
            "right": self.right,
            "accuracy": self.accuracy,
        }

    def as_table(self) -> str:
        lines = ["length   asked   right   accuracy   median prompt"]
        for row in self.rows:
            counts = f"{row.length:6}  {row.questions:6}  {row.right:6}"
            lines.append(f"{counts}  {row.accuracy:9.2%}  {row.tokens_prompt_median:14}")
        lines.append(f"   all  {self.questions:6}  {self.right:6}  {self.accuracy:9.2%}")
        return "\n".join(lines)


@dataclass
class _Asker:
    """A connection pool, and the bound on the number of concurrent requests."""

    client: httpx.AsyncClient
    model: str | None
    turns_at_once: asyncio.Semaphore

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer to ``body``, decoded greedily."""
        named = {} if self.model is None else {"model": self.model}
        response = await self.client.post("/v1/chat/completions", json={**body, "temperature": 0, **named})
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    async def reply(self, messages: list[dict[str, str]]) -> tuple[str, int]:
        """Return the model's answer, and the server's count of prompt tokens."""
        answer = await self.answer({"messages": messages, "max_tokens": ANSWER_TOKENS_MAX})
        tokens = (answer.get("usage") or {}).get("prompt_tokens") or 0
        return answer["choices"][0]["message"].get("content") or "", tokens

    async def hold(self, episode: Episode, heard: Callable[[bool, int], None]) -> None:
        """Run one conversation from the first turn to the last; `heard` gets every scored answer."""
        replies: list[str] = []
        async with self.turns_at_once:
            for index, turn in enumerate(episode.turns):
                if turn.kind == "told":
                    replies.append(turn.reply)
                    continue
                answer, tokens = await self.reply(episode.messages_before(index, replies))
                replies.append(answer)
                if turn.kind == "recall":
                    heard(is_right(answer, turn.reply), tokens)


def _connected(base_url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=REQUEST_SECONDS_MAX,
        transport=transport,
    )


async def _prompt_tokens(asker: _Asker, episode: Episode) -> int | None:
    """Return the number of tokens of the last question's prompt on this server; None if the server cannot count."""
    messages = episode.messages_before(len(episode.turns) - 1)
    body = {"messages": messages} | ({"model": asker.model} if asker.model else {})
    response = await asker.client.post("/tokenize", json=body)
    if response.is_error:
        return None
    return int(response.json()["count"])


async def _fitted_episodes(asker: _Asker, seed: int, length: int, questions: int) -> list[Episode]:
    """Return conversations for `questions` answers, whose last prompts are about `length` tokens long.

    Names cost far more tokens per character than filler, and the mix changes with the length. So the rate
    is fitted for each length: draft, let the server count a few of the prompts, correct, draft again.
    """

    def draft(rate: float) -> list[Episode]:
        def count(text: str) -> int:
            return math.ceil(len(text) / rate)

        candidates = make_episodes(seed, length, questions, count, questions=QUESTIONS_PER_EPISODE)
        chosen: list[Episode] = []
        planned = 0
        for episode in candidates:
            if planned >= questions:
                break
            chosen.append(episode)
            planned += sum(turn.kind == "recall" for turn in episode.turns)
        return chosen

    rate = CHARACTERS_PER_TOKEN
    for _ in range(FITTING_ROUNDS):
        counts = [await _prompt_tokens(asker, episode) for episode in draft(rate)[:FITTING_SAMPLE]]
        counted = [count for count in counts if count]
        if not counted:
            break
        rate = min(16.0, max(1.0, rate * length / statistics.mean(counted)))
    return draft(rate)


async def score_recall(
    base_url: str,
    model: str | None,
    *,
    api_key: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    questions_per_length: int = 200,
    concurrency: int = 8,
    seed: int = 1,
    on_progress: Progress | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> RecallReport:
    """Ask at least `questions_per_length` questions per length; `on_progress` gets (answered, planned).

    `base_url` may end with /v1 or not. `transport`: replaces the server in tests.
    """
    async with _connected(base_url, api_key, transport) as client:
        asker = _Asker(client, model, asyncio.Semaphore(concurrency))
        plan = {length: await _fitted_episodes(asker, seed, length, questions_per_length) for length in lengths}
        planned = sum(turn.kind == "recall" for fitted in plan.values() for e in fitted for turn in e.turns)
        answered = 0
        rows = []
        for length, episodes in plan.items():
            results: list[tuple[bool, int]] = []

            def heard(right: bool, tokens: int, results: list[tuple[bool, int]] = results) -> None:
                nonlocal answered
                answered += 1
                results.append((right, tokens))
                if on_progress is not None:
                    on_progress(answered, planned)

            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(asker.hold(episode, heard))
            right = sum(good for good, _ in results)
            median = int(statistics.median(tokens for _, tokens in results)) if results else 0
            rows.append(RecallRow(length, len(results), right, right / max(1, len(results)), median))
    return RecallReport(tuple(rows))


Skill = Literal["tools", "json"]
SKILL_LENGTHS = (256, 512)
SKILL_TOKENS_MAX = 256
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

    def body(self) -> dict[str, Any]:
        """Return the request for this turn."""
        body: dict[str, Any] = {
            "messages": chat_messages(self.episode, self.turn_index),
            "max_tokens": SKILL_TOKENS_MAX,
        }
        if self.episode.tools:
            body["tools"] = list(self.episode.tools)
        if self.turn.schema is not None:
            wanted = {"name": "answer", "schema": self.turn.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return body

    def is_right(self, message: dict[str, Any]) -> bool:
        """Return whether the answer has the right calls, the right value, or exactly the right text."""
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
    questions: int = 0
    right: int = 0

    @property
    def accuracy(self) -> float:
        return self.right / self.questions if self.questions else 0.0


@dataclass
class SkillReport:
    """Rows by kind of question; `controls` are counted apart."""

    rows: list[SkillRow] = field(default_factory=list)
    controls: list[SkillRow] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        total = sum(row.questions for row in self.rows)
        return sum(row.right for row in self.rows) / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [_row_json(row) for row in self.rows],
            "controls": [_row_json(row) for row in self.controls],
            "accuracy": self.accuracy,
        }

    def as_table(self) -> str:
        lines = [f"{'case':32}  asked   right   accuracy"]
        for row in [*self.rows, *self.controls]:
            lines.append(f"{row.case:32} {row.questions:6}  {row.right:6}  {row.accuracy:9.2%}")
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


def make_questions(skill: Skill, seed: int, length: int, count: int) -> list[SkillQuestion]:
    """Return at least `count` questions, of complete conversations."""
    return list(_enough(_questions(skill, seed, length, count), count))


def _questions(skill: Skill, seed: int, length: int, count: int) -> Iterator[list[SkillQuestion]]:
    if skill == "tools":
        for episode in make_tools_episodes(seed, length, count, _characters):
            yield [
                SkillQuestion(_tools_case(episode, turn), episode, index)
                for index, turn in enumerate(episode.turns)
                if turn.kind in SCORED
            ]
        return
    forms = list(dict.fromkeys(FORMS))
    by_form = [make_facts_episodes(seed, length, count, _characters, form=form) for form in forms]
    for episodes in zip(*by_form, strict=True):
        for form, episode in zip(forms, episodes, strict=True):
            yield [
                SkillQuestion(f"facts as {form}", episode, index)
                for index, turn in enumerate(episode.turns)
                if turn.kind == "json"
            ]


def _enough(conversations: Iterator[list[SkillQuestion]], count: int) -> Iterator[SkillQuestion]:
    for questions in conversations:
        if count <= 0:
            return
        count -= len(questions)
        yield from questions


def control_questions(skill: Skill, questions: Sequence[SkillQuestion]) -> list[SkillQuestion]:
    """Return the same questions with the tools, or with the facts, of the next conversation."""
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
    """Ask every question, at most `concurrency` at once; `on_progress` gets (answered, planned)."""
    questions = [
        question for length in lengths for question in make_questions(skill, seed, length, questions_per_length)
    ]
    spoilt = control_questions(skill, questions) if controls else []
    report, answered = SkillReport(), 0
    async with _connected(base_url, api_key, transport) as client:
        asker = _Asker(client, model, asyncio.Semaphore(concurrency))

        async def ask(question: SkillQuestion, row: SkillRow) -> None:
            nonlocal answered
            async with asker.turns_at_once:
                answer = await asker.answer(question.body())
            row.questions += 1
            row.right += question.is_right(answer["choices"][0]["message"])
            answered += 1
            if on_progress is not None:
                on_progress(answered, len(questions) + len(spoilt))

        async with asyncio.TaskGroup() as group:
            for rows, questions_of_rows in ((report.rows, questions), (report.controls, spoilt)):
                row_of: dict[str, SkillRow] = {}
                for question in questions_of_rows:
                    row = row_of.setdefault(question.case, SkillRow(question.case))
                    group.create_task(ask(question, row))
                rows += row_of.values()
    return report
