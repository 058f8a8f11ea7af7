"""Agents of six turns through /v1/responses and /v1/messages, with the real clients and a real engine.

The model has random weights, and a grammar makes it call a tool in each turn (``tool_choice``). Every turn
after the first finds the conversation before it in the prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server
from tests.server.test_tools import TEMPLATES

TURNS = 6
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "64MB", "threads": 1, "max_model_len": 4096}
    path: Path = tmp_path_factory.mktemp("store") / "responses.sqlite"
    with running_server(
        "", engine=engine, server={"chat_template": str(TEMPLATES / "hermes_think.jinja"), "response_store": str(path)}
    ) as running:
        yield running


def weather(arguments: str | dict[str, Any]) -> str:
    """The tool."""
    city = (json.loads(arguments) if isinstance(arguments, str) else arguments)["city"]
    return {"Rome": "23 degrees and sunny", "Oslo": "4 degrees and rain"}[city]


def check_hits(prompts: list[int], cached: list[int]) -> None:
    """All of the prompt before comes from the cache, but for its end: where an answer follows, the template
    writes its opening in another way. Snapshots have a grid of up to 64 tokens."""
    assert len(prompts) == TURNS
    assert cached[0] == 0
    for before, hit in zip(prompts[:-1], cached[1:], strict=True):
        assert before - 2 * 64 < hit <= before + 64


def test_an_agent_of_responses_hits_the_cache_in_each_turn(server: RunningServer) -> None:
    client = server.client()
    given: Any = "What is the weather?"
    prompts, cached, last = [], [], None
    for _ in range(TURNS):
        answer = client.responses.create(
            model="default",
            input=given,
            previous_response_id=last,
            instructions="Call a tool.",
            tools=[{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=200,
            temperature=0,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        assert answer.usage is not None
        assert (answer.status, len(calls)) == ("completed", 1)
        given = [
            {"type": "function_call_output", "call_id": call.call_id, "output": weather(call.arguments)}
            for call in calls
        ]
        last = answer.id
        prompts.append(answer.usage.input_tokens)
        cached.append(answer.usage.input_tokens_details.cached_tokens)
    check_hits(prompts, cached)


def test_an_agent_of_messages_hits_the_cache_in_each_turn(server: RunningServer) -> None:
    import anthropic  # here: it has 3,200 modules, two seconds of each worker

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    turns: list[Any] = [{"role": "user", "content": "How is the weather there?"}]
    prompts, cached = [], []
    for _ in range(TURNS):
        answer = client.messages.create(
            model="default",
            max_tokens=200,
            messages=turns,
            system="Use the tool.",
            tools=[{"name": "weather", "input_schema": SCHEMA}],
            extra_body={"temperature": 0},
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        [call] = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use"
        turns += [
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": weather(call.input)}],
            },
        ]
        usage = answer.usage
        cached.append(usage.cache_read_input_tokens or 0)
        prompts.append(usage.input_tokens + cached[-1] + (usage.cache_creation_input_tokens or 0))
    check_hits(prompts, cached)


@pytest.mark.parametrize("allowed", ["news", "weather"])
def test_only_allowed_tools_are_called_and_the_prompt_has_all(server: RunningServer, allowed: str) -> None:
    client = server.client()
    names = ["weather", "news", "mail"]
    fields: Any = {
        "model": "default",
        "temperature": 1,
        "extra_body": {"seed": 3, "chat_template_kwargs": {"enable_thinking": False}},
    }
    answer = client.responses.create(
        input="Go.",
        tools=[{"type": "function", "name": name, "parameters": SCHEMA} for name in names],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": allowed}]},
        max_output_tokens=200,
        **fields,
    )
    assert {item.name for item in answer.output if item.type == "function_call"} == {allowed}
    assert answer.tool_choice.type == "allowed_tools"
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Go."}],
        max_tokens=200,
        tools=[{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": allowed}}]},
        },
        **fields,
    )
    assert {call.function.name for call in chat.choices[0].message.tool_calls or ()} == {allowed}
    assert chat.usage is not None
    assert answer.usage is not None
    assert chat.usage.prompt_tokens == answer.usage.input_tokens  # all three tools
