"""Scores the recall task through the HTTP API, as a client that knows nothing of the engine would.

Each conversation is held as a chat: ask, append the model's *own* answer, ask the next. A wrong answer
therefore stays in the context, as it would for a user. The prompt of a later question extends the prompt of
the earlier one, so the score covers prefix hits, carried states and reused pages. A bounded number of
conversations runs at once, so requests also share batches.

Lengths are fitted to the counts of the server's `/tokenize`. For a server without it they are estimated from
characters. Decoding is greedy, so a score measures the server and not luck.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from weft.eval.recall import Episode, is_right, make_episodes

LENGTHS = (128, 256, 512, 1024, 2048)
QUESTIONS_PER_EPISODE = 8
ANSWER_TOKENS_MAX = 48
CHARACTERS_PER_TOKEN = 3.0
FITTING_ROUNDS, FITTING_SAMPLE = 4, 6
REQUEST_SECONDS_MAX = 600.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RecallRow:
    """The result at one length; `tokens_prompt_median` is what the server counted, not what was asked for."""

    length: int
    asked: int
    right: int
    accuracy: float
    tokens_prompt_median: int


@dataclass(frozen=True)
class RecallReport:
    rows: tuple[RecallRow, ...]

    @property
    def asked(self) -> int:
        return sum(row.asked for row in self.rows)

    @property
    def right(self) -> int:
        return sum(row.right for row in self.rows)

    @property
    def accuracy(self) -> float:
        return self.right / self.asked if self.asked else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "asked": self.asked,
            "right": self.right,
            "accuracy": self.accuracy,
        }

    def as_table(self) -> str:
        lines = ["length   asked   right   accuracy   median prompt"]
        for row in self.rows:
            counts = f"{row.length:6}  {row.asked:6}  {row.right:6}"
            lines.append(f"{counts}  {row.accuracy:9.2%}  {row.tokens_prompt_median:14}")
        lines.append(f"   all  {self.asked:6}  {self.right:6}  {self.accuracy:9.2%}")
        return "\n".join(lines)


@dataclass
class _Asker:
    """One open connection pool, and the bound on how many requests are under way."""

    client: httpx.AsyncClient
    model: str | None
    turns_at_once: asyncio.Semaphore

    async def reply(self, messages: list[dict[str, str]]) -> tuple[str, int]:
        """The model's answer, and how long the server says the prompt was."""
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS_MAX}
        if self.model is not None:
            body["model"] = self.model
        response = await self.client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        answer = response.json()
        tokens = (answer.get("usage") or {}).get("prompt_tokens") or 0
        return answer["choices"][0]["message"].get("content") or "", tokens

    async def hold(self, episode: Episode, heard: Callable[[bool, int], None]) -> None:
        """One conversation from its first turn to its last; `heard` gets every scored answer."""
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


def server_root(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")


async def _prompt_tokens(asker: _Asker, episode: Episode) -> int | None:
    """How long the prompt of the last question is on this server; None where it cannot be asked."""
    messages = episode.messages_before(len(episode.turns) - 1)
    body = {"messages": messages} | ({"model": asker.model} if asker.model else {})
    response = await asker.client.post("/tokenize", json=body)
    if response.is_error:
        return None
    return int(response.json()["count"])


async def _fitted_episodes(asker: _Asker, seed: int, length: int, questions: int) -> list[Episode]:
    """Enough conversations for `questions` answers, whose last prompts are about `length` tokens long.

    Names cost far more tokens per character than filler, and the mix changes with the length. So the rate
    is fitted for each length: draft, let the server count a few of the prompts, correct, draft again.
    """

    def draft(rate: float) -> list[Episode]:
        def count(text: str) -> int:
            return math.ceil(len(text) / rate)

        candidates = make_episodes(seed, length, questions, count, questions=QUESTIONS_PER_EPISODE)
        chosen: list[Episode] = []
        asked = 0
        for episode in candidates:
            if asked >= questions:
                break
            chosen.append(episode)
            asked += sum(turn.kind == "recall" for turn in episode.turns)
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
    """Asks at least `questions_per_length` questions per length; `on_progress` gets (answered, planned).

    `base_url` may end with /v1 or not. `transport` lets a test answer in the place of a server.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(
        base_url=server_root(base_url), headers=headers, timeout=REQUEST_SECONDS_MAX, transport=transport
    ) as client:
        asker = _Asker(client, model, asyncio.Semaphore(concurrency))
        plan = {
            length: await _fitted_episodes(asker, seed, length, questions_per_length) for length in lengths
        }
        planned = sum(turn.kind == "recall" for held in plan.values() for e in held for turn in e.turns)
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
