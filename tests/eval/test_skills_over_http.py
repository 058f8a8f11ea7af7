"""Promises of the scorer of tools and JSON, against a server made of a dictionary."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from weft_tools.eval.score import CONTROLS, Skill, make_questions, score_skill
from weft_tools.eval.tool_calls import read_calls

SEED, LENGTH, QUESTIONS = 5, 256, 40


class Server:
    """Gives the right answers, or `wrong` in their place; it looks at the tools and the facts, so that the
    controls find it without an answer."""

    def __init__(self, skill: Skill, wrong: dict[str, Any] | None = None) -> None:
        self.wrong, self.bodies = wrong, []
        self.answers: dict[str, dict[str, Any]] = {}
        for question in make_questions(skill, SEED, LENGTH, QUESTIONS):
            turn, message = question.turn, {"content": question.turn.reply}
            if turn.kind == "call":
                calls = [
                    {"function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
                    for call in read_calls(turn.reply)
                ]
                message = {"content": None, "tool_calls": calls}
            self.answers[self.key(question.body())] = message

    @staticmethod
    def key(body: dict[str, Any]) -> str:
        messages = body["messages"]
        first = next(message["content"] for message in messages if message["role"] == "user")
        return json.dumps([first, messages[-1]["content"], body.get("tools")])

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert request.url.path == "/v1/chat/completions"
        assert body["temperature"] == 0
        self.bodies.append(body)
        message = self.wrong or self.answers.get(self.key(body), {"content": "?"})
        return httpx.Response(200, json={"choices": [{"message": message}]})


async def score(skill: Skill, server: Server, **options: Any):  # type: ignore[no-untyped-def]
    return await score_skill(
        "http://weft.test/v1", None, skill, lengths=[LENGTH], questions_per_length=QUESTIONS, seed=SEED,
        transport=httpx.MockTransport(server), **options,
    )  # fmt: skip


@pytest.mark.parametrize("skill", ["tools", "json"])
async def test_a_server_that_is_always_right_scores_one_and_nothing_in_the_controls(skill: Skill) -> None:
    seen: list[tuple[int, int]] = []
    server = Server(skill)
    report = await score(skill, server, controls=True, on_progress=lambda *counts: seen.append(counts))
    assert report.accuracy == 1.0
    assert sum(row.questions for row in report.rows) >= QUESTIONS
    assert [row.case for row in report.controls] == [CONTROLS[skill]]
    assert report.controls[0].questions > 10
    assert report.controls[0].right == 0
    assert seen[-1][0] == seen[-1][1] == len(server.bodies)
    assert CONTROLS[skill] in report.as_table()


@pytest.mark.parametrize("skill", ["tools", "json"])
async def test_every_wrong_answer_is_counted(skill: Skill) -> None:
    calls = [{"function": {"name": "x", "arguments": "{"}}]
    for wrong in ({"content": "{}"}, {"content": None, "tool_calls": calls}):
        report = await score(skill, Server(skill, wrong))
        assert report.accuracy == 0.0


async def test_requests_have_the_fields_of_their_skill() -> None:
    tools, facts = Server("tools"), Server("json")
    await score("tools", tools)
    await score("json", facts)
    assert all(body["tools"] and "response_format" not in body for body in tools.bodies)
    assert all(body["response_format"]["json_schema"]["schema"] for body in facts.bodies)
