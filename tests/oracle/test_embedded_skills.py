"""The embedded model calls tools and writes JSON through the server, as its pages show it to a newcomer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from weft.cli.remote import own_server
from weft.config import EngineConfig
from weft_tools.eval.score import Skill, score_skill

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather of the coming days.",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip
PERSON = {"type": "object", "required": ["name", "age"], "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"}}}  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_server(EngineConfig(memory="64MiB")) as url:
        yield url


def chat(url: str, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 200, "temperature": 0} | fields
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_an_agent_loop_calls_its_tool_and_answers_from_the_result_with_a_hit_on_every_turn(url: str) -> None:
    messages: list[dict[str, Any]] = []
    turns = (("Paris", "rain"), ("Oslo", "snow"), ("Rome", "sunny"), ("Berlin", "cloudy"), ("Vienna", "fine"))
    for number, (city, weather) in enumerate(turns):
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        called = chat(url, messages, tools=[WEATHER])
        choice = called["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": city}
        messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": weather}]
        answered = chat(url, messages, tools=[WEATHER])
        message = answered["choices"][0]["message"]
        assert message["content"] == f"The weather in {city} is {weather}."
        messages.append(message)
        for answer in [answered, *([called] if number else [])]:
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("others", [True, False])
def test_an_answer_under_a_schema_ends_whether_or_not_there_are_facts(url: str, others: bool) -> None:
    schema = PERSON | {"additionalProperties": others}
    for seed in range(4):
        for question in ("Invent somebody.", "What is the capital of France?", "Ada is 36 years old."):
            answer = chat(url, [{"role": "user", "content": question}], response_format=form(schema),
                          temperature=1, seed=seed)  # fmt: skip
            assert answer["choices"][0]["finish_reason"] == "stop"
            person = json.loads(answer["choices"][0]["message"]["content"])
            jsonschema.validate(person, schema)
    stated = chat(url, [{"role": "user", "content": "Ada is 36 years old."}], response_format=form(schema))
    assert json.loads(stated["choices"][0]["message"]["content"]) == {"name": "Ada", "age": 36}


def score(url: str, skill: Skill) -> tuple[float, float]:
    report = asyncio.run(score_skill(url, None, skill, lengths=[256], questions_per_length=40, controls=True))
    return report.accuracy, report.controls[0].accuracy


def test_calls_and_json_are_right_more_often_than_not_and_never_in_the_controls(url: str) -> None:
    for skill, least in (("tools", 0.55), ("json", 0.5)):
        right, control = score(url, skill)
        assert right >= least
        assert control <= 0.1
