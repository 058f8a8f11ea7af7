"""/v1/responses with the real openai client: whole answers, streams, tools, reasoning, errors and usage.

The engine says what the prompt tells it to, one byte per token, so every marker arrives in pieces. Every
event of a stream is validated against the client's own types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from tests.server.test_messages import mutated
from tests.server.test_tools import CALL, CALL_TIME, TEMPLATES, stop_at_end
from weft.errors import RequestError
from weft.server.protocol import parse_body
from weft.server.responses.items import UNSERVED_IN_RESPONSES, ResponsesBody, check_fields, new_response_id, read_items
from weft.server.responses.turns import responses_turn

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: Any = {"type": "function", "name": "get_time"}
SQL: Any = {"type": "custom", "name": "sql", "description": "Runs SQL."}
SQL_TEXT = 'SELECT "ü"\nFROM t'
CALL_SQL = f"<tool_call>{json.dumps({'name': 'sql', 'arguments': {'input': SQL_TEXT}})}</tool_call>"
EVENTS: Any = pydantic.TypeAdapter(ResponseStreamEvent)
TEXT_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING_EVENTS = [kind.replace("output_text", "reasoning_text") for kind in TEXT_EVENTS]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    directory = write_model_directory(tmp_path_factory.mktemp("hermes"), template=template)
    with running_server("build_paced", engine={"model": str(directory)}) as running:
        yield running


def ask(server: RunningServer, say: str, **more: Any) -> Any:
    return server.client().responses.create(**{"model": "scripted", "input": f"say:{say}", **more})


def events_of(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each validated against the client's types."""
    response = server.post("/v1/responses", {"model": "scripted", "stream": True, **body})
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENTS.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events, deltas that follow each other as one."""
    found: list[str] = []
    for event in events:
        if not (event["type"].endswith(".delta") and found and found[-1] == event["type"]):
            found.append(event["type"])
    return found


def test_a_text_is_answered_whole_with_its_usage(server: RunningServer) -> None:
    answer = ask(server, "Grüße 🏔", metadata={"a": "b"}, temperature=0.0)
    Response.model_validate(answer.to_dict(mode="json"), strict=True)
    assert answer.output_text == "Grüße 🏔"
    assert (answer.object, answer.status, answer.model) == ("response", "completed", "scripted")
    assert answer.metadata == {"a": "b"}
    usage = answer.usage
    assert usage.output_tokens == len("Grüße 🏔".encode()) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    count = server.client().responses.input_tokens.count(model="scripted", input="say:Grüße 🏔")
    assert count.input_tokens == usage.input_tokens


def test_instructions_and_items_become_one_conversation(server: RunningServer) -> None:
    answer = ask(
        server,
        "",
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
            {"role": "user", "content": "say:well"},
        ],
    )
    assert answer.output_text == "well"
    assert answer.instructions == "Be brief."


def test_a_stream_of_text_has_the_documented_events(server: RunningServer) -> None:
    events = events_of(server, input="say:Grüße 🏔")
    assert kinds(events) == ["response.created", "response.in_progress", *TEXT_EVENTS, "response.completed"]
    assert "".join(event["delta"] for event in events if "delta" in event) == "Grüße 🏔"
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["output"][0]["content"][0]["text"]) == ("completed", "Grüße 🏔")
    assert last["usage"]["output_tokens"] == len("Grüße 🏔".encode()) + 1


def test_the_client_assembles_a_stream(server: RunningServer) -> None:
    with server.client().responses.stream(model="scripted", input="say:<think>hm</think>Yes.") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "Yes."
    assert [item.type for item in final.output] == ["reasoning", "message"]


def test_reasoning_is_an_item_of_its_own_and_counted(server: RunningServer) -> None:
    said = "<think>\nhm ü\n</think>\n\nYes."
    answer = ask(server, said)
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "hm ü", [])
    assert message.content[0].text == "Yes."
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>\nhm ü\n</think>".encode())
    assert kinds(events_of(server, input=f"say:{said}")) == [
        "response.created",
        "response.in_progress",
        *REASONING_EVENTS,
        *TEXT_EVENTS,
        "response.completed",
    ]


def test_calls_are_items_and_their_outputs_go_back(server: RunningServer) -> None:
    said = f"I look.\n{CALL}\n{CALL_TIME}"
    answer = ask(server, said, tools=[WEATHER, TIME])
    message, first, second = answer.output
    assert message.content[0].text == "I look."
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "get_weather", {"city": "Köln 🏔"})
    assert (second.name, second.arguments) == ("get_time", "{}")
    assert first.call_id != second.call_id
    events = events_of(server, input=f"say:{said}", tools=[WEATHER, TIME])
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        *TEXT_EVENTS,
        *CALL_EVENTS,
        *CALL_EVENTS,
        "response.completed",
    ]
    turns = [
        {"role": "user", "content": "weather?"},
        *[item.to_dict() for item in answer.output],
        {"type": "function_call_output", "call_id": first.call_id, "output": "12 °C"},
        {"type": "function_call_output", "call_id": second.call_id, "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "say:cold"},
    ]
    assert ask(server, "", input=turns, tools=[WEATHER, TIME]).output_text == "cold"


def test_a_custom_tool_gets_its_text_and_its_output_goes_back(server: RunningServer) -> None:
    said = f"{CALL_SQL}\n{CALL_TIME}"
    sql, clock = ask(server, said, tools=[SQL, TIME]).output
    assert (sql.type, sql.name, sql.input) == ("custom_tool_call", "sql", SQL_TEXT)
    assert (clock.type, clock.name) == ("function_call", "get_time")
    events = events_of(server, input=f"say:{said}", tools=[SQL, TIME])
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        *CALL_EVENTS,
        "response.completed",
    ]
    assert [event["delta"] for event in events if event["type"].endswith("input.delta")] == [SQL_TEXT]
    turns = [
        {"role": "user", "content": "how many?"},
        sql.to_dict(),
        {"type": "custom_tool_call_output", "call_id": sql.call_id, "output": "7"},
        {"role": "user", "content": "say:seven"},
    ]
    assert ask(server, "", input=turns, tools=[SQL]).output_text == "seven"


def test_an_answer_that_is_cut_is_incomplete(server: RunningServer) -> None:
    answer = ask(server, "abcdef", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "abc")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert events_of(server, input="say:abcdef", max_output_tokens=3)[-1]["type"] == "response.incomplete"


def test_an_empty_answer_is_an_empty_message(server: RunningServer) -> None:
    answer = ask(server, "")
    assert (answer.output_text, answer.output[0].type) == ("", "message")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_message_only(server: RunningServer, *, stream: bool) -> None:
    body: Any = {"input": "say:<think>hm</think>Yes.", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events = events_of(server, **body)
        entries = [
            entry
            for event in events
            for entry in event.get("logprobs", ())
            if event["type"] == "response.output_text.delta"
        ]
        answer = events[-1]["response"]
        assert entries == answer["output"][1]["content"][0]["logprobs"]
    else:
        answer = ask(server, "", **body).to_dict()
        entries = answer["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "Yes."
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert answer["top_logprobs"] == 2
    assert ask(server, "say:a").to_dict()["top_logprobs"] == 0


class Colour(pydantic.BaseModel):
    red: bool


def test_a_schema_shapes_the_answer_and_the_client_parses_it(server: RunningServer) -> None:
    answer = server.client().responses.parse(model="scripted", input='say:{"red":true}', text_format=Colour)
    assert answer.output_parsed == Colour(red=True)


def long_conversation(turns: int) -> list[dict[str, Any]]:
    """Each turn has about 100 tokens; the context has 2,048."""
    items: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number in range(turns):
        items += [
            {"role": "user", "content": f"turn {number:3} " + "x" * 40},
            {"role": "assistant", "content": "y" * 40},
        ]
    return [*items, {"role": "user", "content": "say:short"}]


def test_a_conversation_that_is_too_long_is_refused_or_loses_its_oldest_turns(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match=r"--max-model-len") as refusal:
        ask(server, "", input=long_conversation(30))
    assert refusal.value.code == "context_length_exceeded"
    whole = ask(server, "", input=long_conversation(12))
    assert ask(server, "", input=long_conversation(12), truncation="auto").usage == whole.usage
    lengths = []
    for turns in range(30, 38):
        cut = ask(server, "", input=long_conversation(turns), truncation="auto")
        assert (cut.output_text, cut.truncation) == ("short", "auto")
        lengths.append(cut.usage.input_tokens)
    assert max(lengths) <= 2048 - 2048 // 8
    steps = [after - before for before, after in pairwise(lengths)]
    assert sum(step < 0 for step in steps) == 2, "the beginning moves every fourth turn"
    with pytest.raises(openai.BadRequestError, match=r"--max-model-len"):
        ask(server, "", input="x" * 5000, truncation="auto")
    long_answer = ask(server, "", input=long_conversation(30), truncation="auto", max_output_tokens=2040)
    assert long_answer.usage.input_tokens < 200, "only the last turn stays"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "messages[0].content[0]",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": 3}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "functoin", "name": "f", "parameters": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{**SQL, "format": {"type": "xml"}}]}, "tools[0].format.type"),
        (
            {"tools": [{**SQL, "format": {"type": "grammar", "syntax": "bnf", "definition": ""}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [{**SQL, "format": {"type": "grammar", "syntax": "regex"}}]}, "tools[0].format.definition"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": 7}}, "metadata"),
        ({"stream_options": {}}, "stream_options"),
        ({"n": 2}, "n"),
        ({"top_p": 9.0}, "top_p"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_bad_input_is_an_error_that_names_the_field(server: RunningServer, change: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", {"model": "scripted", "input": "say:a", **change})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param.partition("[")[0].partition(".")[0] in error["message"]


def test_an_unknown_model_is_not_found(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="no model"):
        ask(server, "a", model="other")


WHOLE: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "stream": False,
    "store": False,
    "metadata": {"a": "b"},
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "t"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "sql", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "r"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    ],
    "tools": [WEATHER, SQL],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "top_logprobs": 2,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
}


def test_a_damaged_body_is_refused_by_a_request_error_or_served() -> None:
    """Never by another exception, which would be a 500."""
    random, refused = Random(1), 0
    for _ in range(3000):
        body = mutated(random, WHOLE)
        for _ in range(random.randrange(3)):
            body = mutated(random, body)
        try:
            raw = json.dumps(body).encode("utf-8", "surrogatepass")
            parsed = parse_body(raw, ResponsesBody, unserved=UNSERVED_IN_RESPONSES)
            check_fields(parsed)
            turn = responses_turn(parsed, read_items(parsed.input, new_response_id()))
            assert turn.conversation.messages
        except RequestError:
            refused += 1
    assert 1000 < refused < 3000


def test_a_deep_body_is_refused(server: RunningServer) -> None:
    deep = '{"input": ' + '[{"content": ' * 50_000 + "1" + "}]" * 50_000 + "}"
    response = httpx.post(f"{server.url}/v1/responses", content=deep, headers={"content-type": "application/json"})
    assert response.status_code == 400
