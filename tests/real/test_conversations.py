"""Users of a released model over HTTP: a long chat whose prompts hit, JSON by schema, an agent and its tools."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import ollama
import pytest

from tests.server.running import RunningServer

PAGE = 16
TURNS = 20
ANSWER_TOKENS = 8
"""An answer is cut: what a turn computes does not depend on its length, and a slow CPU makes 20 tokens a second."""
TOPICS = (
    "a lighthouse", "bread", "winter", "a violin", "the moon", "tea", "a bridge", "bees", "a map", "glass",
    "a river", "salt", "a clock", "wool", "thunder", "chess", "a garden", "ink", "a train", "sleep",
)  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "married": {"type": "boolean"},
        },
        "required": ["name", "age", "married"],
        "additionalProperties": False,
    },
    "list": {
        "type": "array",
        "items": {"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}},
                  "required": ["colour"], "additionalProperties": False},
        "minItems": 2,
        "maxItems": 3,
    },
    "union": {
        "type": "object",
        "properties": {"value": {"anyOf": [{"type": "null"}, {"type": "number"}, {"type": "string", "maxLength": 12}]},
                       "kind": {"type": "string", "pattern": "^[a-z]{2,6}-[0-9]{1,3}$"}},
        "required": ["value", "kind"],
        "additionalProperties": False,
    },
}  # fmt: skip
SEEDS = range(3)
CITIES = {"Rome": "23 degrees and sunny", "Oslo": "4 degrees and rain"}
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_simple_question_has_the_right_answer(plain_server: RunningServer) -> None:
    client = ollama.Client(host=plain_server.url)
    # Another token is 0.25 behind or more at each step, on each instruction set: others tie in bfloat16.
    question = [{"role": "user", "content": "How many legs has a dog?"}]
    said = client.chat(model="default", messages=question, options={"temperature": 0})
    assert said.message.content == "The answer is 4. A dog has 4 legs."


WITH_IDS = {"return_token_ids": True}


def test_each_of_20_turns_computes_what_is_new_and_no_more(plain_server: RunningServer) -> None:
    client, messages = plain_server.client(), []
    known: list[int] = []
    for turn, topic in enumerate(TOPICS):
        messages.append({"role": "user", "content": f"{turn + 1}. Say one sentence about {topic}."})
        answer = client.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=ANSWER_TOKENS, extra_body=WITH_IDS
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        prompt, said = answer.prompt_token_ids, answer.choices[0].token_ids  # type: ignore[attr-defined]
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        # An answer's text may be cut into other tokens than the model chose: the prompts differ from there on.
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, prompt, strict=False)))
        assert cached > same - PAGE, f"turn {turn + 1}: {cached} of the {same} tokens that were computed before"
        assert same > len(known) - ANSWER_TOKENS, "nothing but the last answer may differ"
        known = [*prompt, *said[:-1]]  # the last token was not computed
    assert len(messages) == 2 * TURNS
    assert len(known) > TURNS * 20


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_follows_its_schema_at_temperature_1(plain_server: RunningServer, name: str) -> None:
    client = plain_server.client()
    found = set()
    for seed in SEEDS:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"Write JSON: a {name}."}],
            response_format={"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name]}},
            temperature=1,
            seed=seed,
            max_tokens=200,
        )
        assert answer.choices[0].finish_reason == "stop"
        text = str(answer.choices[0].message.content)
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        found.add(text)
    assert len(found) > 1, "it was sampled"


def test_an_agent_calls_its_tool_reads_the_result_and_hits_the_cache(server: RunningServer) -> None:
    """Twice: a call is asked for, streamed, answered, and the model says what it makes of the result."""
    client = server.client()
    messages: list[Any] = [{"role": "system", "content": "You use tools."}]
    prompt_before = 0
    for turn in range(2):
        messages.append({"role": "user", "content": f"{turn + 1}. What is the weather in {list(CITIES)[turn % 2]}?"})
        call, usage = _streamed_call(client, messages)
        assert json.loads(call["arguments"])["city"] in CITIES
        assert call["name"] == "get_weather"
        assert usage.prompt_tokens_details.cached_tokens >= max(0, prompt_before - 2 * PAGE)
        messages.append({"role": "assistant", "content": "", "tool_calls": [_as_message(call)]})
        result = CITIES[json.loads(call["arguments"])["city"]]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        last = client.chat.completions.create(
            model="default", messages=messages, tools=[WEATHER], temperature=0, max_tokens=12, extra_body=PLAIN
        )
        assert last.choices[0].message.content or last.choices[0].message.tool_calls
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert (last.usage.prompt_tokens_details.cached_tokens or 0) > usage.prompt_tokens - 2 * PAGE
        prompt_before = last.usage.prompt_tokens
        messages.append({"role": "assistant", "content": last.choices[0].message.content or "Done."})


def _streamed_call(client: Any, messages: list[Any]) -> tuple[dict[str, str], Any]:
    """The one call of an answer, put together as clients do, and the usage."""
    call, usage = {"id": "", "name": "", "arguments": ""}, None
    stream = client.chat.completions.create(
        model="default",
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=64,
        extra_body=PLAIN,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            call["id"] += part.id or ""
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
    return call, usage


def _as_message(call: dict[str, str]) -> dict[str, Any]:
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
