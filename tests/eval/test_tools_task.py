"""Promises of the tools task: honest splits, calls that can be known, texts that the API form gives back."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from weft_tools.eval.recall import Episode
from weft_tools.eval.tool_calls import (
    DONE,
    NO_TOOL,
    chat_messages,
    make_tools_episode,
    make_tools_episodes,
    read_calls,
    tool_line,
)
from weft_tools.eval.words import split_of


def by_thirds(text: str) -> int:
    return len(text) // 3 + 1


def episodes(split: str, count: int = 120) -> list[Episode]:
    return [make_tools_episode(random.Random(seed), 400, by_thirds, split=split) for seed in range(count)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def held_out() -> list[Episode]:
    return episodes("held_out")


def names_of(those: list[Episode]) -> set[str]:
    return {tool["function"]["name"] for episode in those for tool in episode.tools}


def test_a_scored_tool_never_occurs_in_training(held_out: list[Episode]) -> None:
    training, scored = names_of(episodes("training")), names_of(held_out)
    assert min(len(training), len(scored)) > 100
    assert not training & scored
    assert {split_of(name) for name in scored} == {"held_out"}


def test_every_call_names_a_tool_and_fits_its_schema(held_out: list[Episode]) -> None:
    checked = 0
    for episode in held_out:
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in episode.tools}
        for turn in episode.turns:
            for call in read_calls(turn.reply):
                jsonschema.validate(call["arguments"], schemas[call["name"]])
                checked += 1
    assert checked > 150


def test_every_argument_stands_in_the_request_or_in_the_list(held_out: list[Episode]) -> None:
    for episode in held_out:
        for turn in episode.turns:
            for call in read_calls(turn.reply):
                for value in call["arguments"].values():
                    assert str(value) in turn.user or str(value) in episode.turns[0].user


def test_every_answer_from_a_result_repeats_it(held_out: list[Episode]) -> None:
    answers = [turn for episode in held_out for turn in episode.turns if turn.kind == "answer"]
    plain = [turn for turn in answers if turn.reply.startswith("The ") and turn.user.count("{") == 0]
    assert len(plain) > 30
    for turn in plain:
        assert turn.user.split("\n")[1] in turn.reply
    assert any(turn.reply == DONE for turn in answers)


def test_a_request_that_no_tool_fits_has_no_noun_of_a_tool(held_out: list[Episode]) -> None:
    strangers = [turn for episode in held_out for turn in episode.turns if turn.kind == "no_tool"]
    assert len(strangers) > 5
    assert {turn.reply for turn in strangers} == {NO_TOOL}


def test_the_same_seed_makes_the_same_conversations_and_another_seed_does_not() -> None:
    once = make_tools_episodes(7, 300, 3, by_thirds)
    assert once == make_tools_episodes(7, 300, 3, by_thirds)
    assert once != make_tools_episodes(8, 300, 3, by_thirds)


def test_a_tool_takes_one_line_of_the_prompt() -> None:
    parameters = {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]}, "day": {}}}  # fmt: skip
    tool = {"type": "function", "function": {"name": "get", "description": "It.", "parameters": parameters}}
    assert tool_line(tool) == "get(city: string, unit?: c|f, day?: any): It."


def test_messages_of_the_api_have_calls_and_results_as_fields(held_out: list[Episode]) -> None:
    results = 0
    for episode in held_out:
        ids: set[str] = set()
        for message in chat_messages(episode, len(episode.turns) - 1):
            assert "<tool" not in (message["content"] or "")
            for call in message.get("tool_calls", ()):
                ids.add(call["id"])
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
            if message["role"] == "tool":
                results += 1
                assert message["tool_call_id"] in ids
    assert results > 50
