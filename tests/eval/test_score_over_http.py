"""Promises of the scorer, against a server made of a dictionary."""

from __future__ import annotations

import json

import httpx

from weft_tools.eval.recall import Episode, make_episodes
from weft_tools.eval.score import score_recall

SEED, LENGTHS, QUESTIONS = 5, (128, 256), 12


def by_thirds(text: str) -> int:
    return -(-len(text) // 3)


class Server:
    """Knows the right answers by heart and gives a wrong one to every `wrong_every`-th question."""

    def __init__(self, wrong_every: int = 0) -> None:
        self.wrong_every, self.asked, self.at_once, self.most_at_once = wrong_every, 0, 0, 0
        self.prompts: list[list[dict[str, str]]] = []
        self.answers: dict[tuple[str, str], str] = {}
        for length in LENGTHS:
            for episode in make_episodes(SEED, length, QUESTIONS, by_thirds):
                self.learn(episode)

    def learn(self, episode: Episode) -> None:
        for turn in episode.turns:
            self.answers[episode.turns[0].user, turn.user] = turn.reply

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(404)
        assert request.url.path == "/v1/chat/completions"
        assert body["temperature"] == 0
        messages = body["messages"]
        self.prompts.append(messages)
        users = [message["content"] for message in messages if message["role"] == "user"]
        answer = self.answers[users[0], users[-1]]
        self.asked += 1
        if self.wrong_every and self.asked % self.wrong_every == 0:
            answer = "0"
        choice = {"message": {"role": "assistant", "content": answer}}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": len(str(messages)) // 3}})


async def score(server: Server, seen: list[tuple[int, int]] | None = None):  # type: ignore[no-untyped-def]
    return await score_recall(
        "http://weft.test/v1",
        None,
        lengths=LENGTHS,
        questions_per_length=QUESTIONS,
        concurrency=2,
        seed=SEED,
        on_progress=(lambda *progress: seen.append(progress)) if seen is not None else None,
        transport=httpx.MockTransport(server),
    )


async def test_a_server_that_is_always_right_scores_one() -> None:
    seen: list[tuple[int, int]] = []
    report = await score(Server(), seen)
    assert report.accuracy == 1.0
    assert [row.length for row in report.rows] == list(LENGTHS)
    assert all(row.questions >= QUESTIONS for row in report.rows)
    assert seen[-1] == (report.questions, report.questions)


async def test_every_wrong_answer_is_counted() -> None:
    server = Server(wrong_every=4)
    report = await score(server)
    assert report.questions - report.right == server.asked // 4
    assert report.to_json()["right"] == report.right
    assert f"{report.accuracy:.2%}" in report.as_table()


async def test_the_models_own_wrong_answer_stays_in_the_conversation() -> None:
    server = Server(wrong_every=1)
    report = await score(server)
    assert report.right == 0
    replies = [m["content"] for prompt in server.prompts for m in prompt if m["role"] == "assistant"]
    assert "0" in replies
    assert set(replies) <= {"0", "Noted."}


async def test_prompts_are_as_long_as_asked_for_whatever_a_token_is_on_this_server() -> None:
    lengths: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        messages = json.loads(request.content)["messages"]
        tokens = sum(len(message["content"]) for message in messages) // 5
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"count": tokens})
        lengths.append(tokens)
        choice = {"message": {"role": "assistant", "content": "?"}}
        return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": tokens}})

    await score_recall(
        "http://weft.test", "m", lengths=[512], questions_per_length=40, transport=httpx.MockTransport(answer)
    )
    assert 480 < max(lengths) < 620
