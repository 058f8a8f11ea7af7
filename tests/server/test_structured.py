"""Structured output and calls that must be made, over HTTP: random weights, the real engine, the real client.
What comes is valid, or was cut off by max_tokens."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server

TEMPLATE = Path(__file__).resolve().parents[1] / "fixtures" / "family_templates" / "hermes_think.jinja"
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
HI = [{"role": "user", "content": "Hi"}]
FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["days", "unit"],
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
        },
    },
}
NOTE = {"type": "function", "function": {"name": "note"}}


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    name: str = pydantic.Field(max_length=5)


PET_TOKENS_MAX = 450
"""Thirteen places for up to 25 characters of whitespace, and less than 100 of anything else."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "64MB", "threads": 1, "max_model_len": 2048}
    with running_server("", engine=engine, server={"chat_template": str(TEMPLATE)}) as running:
        yield running


def chat(server: RunningServer, **more: Any) -> Any:
    more.setdefault("extra_body", {})
    more["extra_body"] = {**NO_THINKING, **more["extra_body"]}
    return server.client().chat.completions.create(
        **{"model": "default", "messages": HI, "max_tokens": 400, "seed": 3, "temperature": 1.0, **more}
    )


def complete(server: RunningServer, **more: Any) -> Any:
    return server.client().completions.create(
        **{"model": "default", "prompt": "x", "max_tokens": 200, "temperature": 1.0, "seed": 5, **more}
    )


def test_the_clients_parse_helper_gives_an_object(server: RunningServer) -> None:
    answer = server.client().chat.completions.parse(
        model="default",
        messages=HI,
        response_format=Pet,
        max_tokens=PET_TOKENS_MAX,
        seed=2,
        temperature=1.0,
        n=2,
        extra_body=NO_THINKING,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Pet)
    assert len({choice.message.content for choice in answer.choices}) == 2


def test_a_json_object_may_have_a_schema(server: RunningServer) -> None:
    """llama-server's form."""
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    choice = chat(server, response_format={"type": "json_object", "schema": schema}, max_tokens=60).choices[0]
    assert json.loads(choice.message.content) == {"a": 7}
    with pytest.raises(openai.BadRequestError, match=r"response_format\.schema is int"):
        chat(server, response_format={"type": "json_object", "schema": 7})


def test_a_json_object_is_one(server: RunningServer) -> None:
    choice = chat(server, response_format={"type": "json_object"}, temperature=0.0, max_tokens=50).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_grammar_holds_in_completions(server: RunningServer, stream: bool) -> None:
    def text(**grammar: Any) -> str:
        answer = complete(server, stream=stream, extra_body=grammar)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert choices[-1].finish_reason == "stop"
        return "".join(choice.text for choice in choices)

    assert text(guided_choice=["left", "right"]) in ("left", "right")
    assert re.fullmatch(r"\d{3}-[xy]{2}", text(guided_regex=r"\d{3}-[xy]{2}"))
    assert re.fullmatch(r"<[0-9]{1,2}>", text(guided_grammar='root ::= "<" [0-9]{1,2} ">"'))
    assert json.loads(text(guided_json={"enum": [1, "a"]})) in (1, "a")
    assert text(structured_outputs={"choice": ["up"]}) == "up"
    schema = FORECAST["function"]["parameters"]
    compact = text(structured_outputs={"json": schema, "disable_any_whitespace": True})
    assert re.fullmatch(r'\{"days":[1-9],"unit":"[CF]"\}', compact)


def test_a_grammar_works_with_logprobs_and_several_answers(server: RunningServer) -> None:
    answer = chat(server, n=4, logprobs=True, top_logprobs=2, extra_body={"structured_outputs": {"regex": "[a-p]{6}"}})
    assert all(re.fullmatch("[a-p]{6}", choice.message.content) for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) == 4
    for choice in answer.choices:
        assert "".join(entry.token for entry in choice.logprobs.content[:-1]) == choice.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made_and_fits_its_schema(server: RunningServer, stream: bool) -> None:
    answer = chat(server, tools=[FORECAST, NOTE], tool_choice="required", parallel_tool_calls=False, stream=stream)
    if stream:
        choices = [choice for chunk in answer for choice in chunk.choices]
        deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
        name, reason = deltas[0].function.name, choices[-1].finish_reason
        arguments = "".join(delta.function.arguments for delta in deltas)
    else:
        [call] = answer.choices[0].message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
    assert reason == "tool_calls"
    expected = {"days", "unit"} if name == "forecast" else set()
    assert set(json.loads(arguments)) == expected


def test_a_named_function_is_called(server: RunningServer) -> None:
    for seed in range(3):
        answer = chat(
            server,
            tools=[NOTE, FORECAST],
            seed=seed,
            tool_choice={"type": "function", "function": {"name": "forecast"}},
        )
        [call] = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, set(arguments)) == ("forecast", {"days", "unit"})
        assert arguments["days"] in range(1, 10)


def test_an_answer_that_is_cut_off_says_length(server: RunningServer) -> None:
    choice = chat(server, max_tokens=6, extra_body={"guided_regex": "[a-z]{40}"}).choices[0]
    assert choice.finish_reason == "length"
    assert re.fullmatch("[a-z]{6,39}", choice.message.content)


async def test_many_grammars_at_once_disturb_nobody(server: RunningServer) -> None:
    client = server.async_client()
    free = {
        "model": "default",
        "prompt": [7, 8, 9],
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    alone = (await client.completions.create(**free)).choices[0].token_ids

    async def numbered(at: int) -> tuple[int, str]:
        answer = await client.completions.create(
            model="default",
            prompt="x",
            max_tokens=100,
            seed=at,
            temperature=1.0,
            extra_body={"guided_json": {"enum": [f"answer {at}", at]}},
        )
        return at, answer.choices[0].text

    async def bad(at: int) -> None:
        with pytest.raises(Exception, match="guided_regex"):
            await client.completions.create(model="default", prompt="x", extra_body={"guided_regex": f"({at}"})

    work = [task for at in range(12) for task in (numbered(at), client.completions.create(**free), bad(at))]
    results = await asyncio.gather(*work)
    for at, text in (result for result in results if isinstance(result, tuple)):
        assert json.loads(text) in (f"answer {at}", at)
    others = [result.choices[0].token_ids for result in results if hasattr(result, "choices")]
    assert others == [alone] * 12


def test_a_form_after_a_trigger(server: RunningServer) -> None:
    pet = {"type": "json_schema", "json_schema": Pet.model_json_schema()}
    tags = [{"begin": "<pet kind>", "content": pet, "end": "</pet>"}]
    form = {
        "type": "triggered_tags",
        "triggers": ["<pet"],
        "tags": tags,
        "at_least_one": True,
        "stop_after_first": True,
    }
    begun = {"type": "sequence", "elements": [{"type": "const_string", "value": "So: <pet kind>"}, pet]}
    for asked in (form, begun):
        made = chat(server, response_format={"type": "structural_tag", "format": asked}, max_tokens=PET_TOKENS_MAX)
        [choice] = made.choices
        text = choice.message.content
        if asked is begun or "<pet" in text:
            found = re.search(r"<pet kind>(.*?)(?:</pet>)?$", text, flags=re.DOTALL)
            assert found is not None, text
            if choice.finish_reason == "stop":
                Pet.model_validate_json(found[1])
    assert choice.finish_reason == "stop"
