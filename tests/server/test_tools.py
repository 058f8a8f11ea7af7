"""Reasoning and tool calls over HTTP, with the openai client: whole answers, streams, and turns that follow.

The engine says what the prompt tells it to, one byte per token, so every marker arrives in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.constrained import tokenizer
from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from weft.errors import ConfigError
from weft.server.chat import ChatAnswer, stream_deltas
from weft.server.config import ServerConfig
from weft.text.chat import ChatTemplate
from weft.text.dialect import Dialect
from weft.text.tools.definitions import ToolChoice, read_tools
from weft.text.tools.json_calls import HELD_CHARS

TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures" / "family_templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🏔"}}\n</tool_call>'
CALL_TIME = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


def stop_at_end(template: str) -> str:
    """The engine ends its script where the next turn begins, so nothing may stand between."""
    return template.replace("<|im_end|>\\n", "").replace("<|im_start|>assistant\\n", "<|assistant|>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    directory = write_model_directory(tmp_path_factory.mktemp("hermes"), template=template)
    with running_server("build_paced", engine={"model": str(directory)}) as running:
        yield running


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = stop_at_end((TEMPLATES / "lfm2.jinja").read_text())
    directory = write_model_directory(
        tmp_path_factory.mktemp("lfm2"),
        template=template,
        markers=("<|tool_call_start|>", "<|tool_call_end|>", "<|other|>"),
    )
    with running_server("build", engine={"model": str(directory)}) as running:
        yield running


def chat(server: RunningServer, say: str, **more: Any) -> Any:
    return server.client().chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": f"say:{say}"}], **more
    )


def gathered(chunks: Any) -> dict[str, Any]:
    """A stream put together again as clients do."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "reason": None, "chunks": 0}
    for chunk in chunks:
        for choice in chunk.choices:
            found["chunks"] += 1
            found["content"] += choice.delta.content or ""
            extra = choice.delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            found["reasoning"] += extra.get("reasoning_content") or ""
            found["reason"] = choice.finish_reason or found["reason"]
            for delta in choice.delta.tool_calls or []:
                call = found["calls"].setdefault(delta.index, {"id": None, "name": None, "arguments": ""})
                if delta.id is not None:
                    assert call["id"] is None, "an id comes once"
                    assert delta.type == "function"
                    call.update(id=delta.id, name=delta.function.name)
                call["arguments"] += delta.function.arguments
    return found


def test_reasoning_is_told_apart_and_counted(server: RunningServer) -> None:
    answer = chat(server, "<think>\nhm ü\n</think>\n\nYes.")
    message = answer.choices[0].message
    assert message.content == "Yes."
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "hm ü"
    assert message.tool_calls is None
    reasoned = len("<think>\nhm ü\n</think>".encode())
    assert answer.usage.completion_tokens_details.reasoning_tokens == reasoned
    assert answer.usage.completion_tokens == reasoned + len("\n\nYes.") + 1


def test_a_stream_has_the_reasoning_in_its_own_deltas(server: RunningServer) -> None:
    found = gathered(chat(server, "<think>\nhm ü\n</think>\n\nYes <think>.", stream=True))
    assert (found["reasoning"], found["content"], found["reason"]) == ("hm ü", "Yes <think>.", "stop")


def test_stop_strings_end_the_answer_and_not_the_reasoning(server: RunningServer) -> None:
    say, stop = "<think>\nQuestion: 2?\n\nSo 4.\n</think>\n\nIt is 4.\n\nQuestion: 3?", ["Question:", "</think>"]
    choice = chat(server, say, stop=stop).choices[0]
    assert choice.message.content == "It is 4.\n\n"
    assert choice.message.model_extra["reasoning"] == "Question: 2?\n\nSo 4."
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", "Question:")
    found = gathered(chat(server, say, stop=stop, stream=True))
    assert (found["content"], found["reasoning"]) == ("It is 4.\n\n", "Question: 2?\n\nSo 4.")
    assert chat(server, say, stop="\n\n").choices[0].message.content == "It is 4."


def test_reasoning_can_be_left_out(server: RunningServer) -> None:
    leave_out = {"extra_body": {"include_reasoning": False}}
    answer = chat(server, "<think>hm</think>Yes.", **leave_out)
    assert answer.choices[0].message.content == "Yes."
    assert "reasoning_content" not in answer.choices[0].message.model_extra
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    found = gathered(chat(server, "<think>hm</think>Yes.", stream=True, **leave_out))
    assert (found["reasoning"], found["content"]) == ("", "Yes.")


def test_reasoning_is_switched_off_in_the_words_of_every_api(server: RunningServer) -> None:
    def prompt_tokens(**fields: Any) -> int:
        answer = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "say:a"}], "max_tokens": 1, **fields}
        )
        assert ("thinking" in answer.headers.get("x-weft-ignored", "")) == (fields.get("thinking") == "off")
        return int(answer.json()["usage"]["prompt_tokens"])

    on, off = prompt_tokens(), prompt_tokens(chat_template_kwargs={"enable_thinking": False})
    assert on < off  # the template closes the reasoning
    disabled = {"type": "disabled"}
    for fields in (
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"enable_thinking": False},
        {"thinking": disabled},
    ):
        assert prompt_tokens(**fields) == off
    for fields in (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        {"enable_thinking": True, "thinking": disabled},
        {"thinking": {"type": "enabled"}},
        {"thinking": "off"},
    ):
        assert prompt_tokens(**fields) == on
    said = {"input": "say:a", "max_output_tokens": 1}
    more = server.post("/v1/responses", {**said, "reasoning": {"effort": "none"}}).json()["usage"]["input_tokens"]
    assert more - server.post("/v1/responses", said).json()["usage"]["input_tokens"] == off - on


def test_an_answer_without_reasoning_has_none(server: RunningServer) -> None:
    answer = chat(server, "Yes.")
    assert answer.choices[0].message.model_extra == {}
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_call_is_an_object_with_id_name_and_arguments_as_json(server: RunningServer) -> None:
    answer = chat(server, f"<think>look</think>I look.\n{CALL}\n{CALL_TIME}", tools=[WEATHER, TIME])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.model_extra["reasoning"]) == ("I look.", "look")
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "get_weather")
    assert json.loads(first.function.arguments) == {"city": "Köln 🏔"}
    assert (second.function.name, second.function.arguments) == ("get_time", "{}")
    assert first.id != second.id
    alone = chat(server, CALL, tools=[WEATHER]).choices[0].message
    assert alone.content is None
    assert len(alone.tool_calls) == 1


def test_a_stream_of_calls_has_the_name_and_the_arguments_of_each(server: RunningServer) -> None:
    chunks = list(
        chat(
            server,
            f"I look.\n{CALL}\n{CALL_TIME}",
            tools=[WEATHER, TIME],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    found = gathered(chunks)
    assert (found["content"], found["reason"]) == ("I look.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in found["calls"].values()] == [
        ("get_weather", {"city": "Köln 🏔"}),
        ("get_time", {}),
    ]
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 0


def test_the_arguments_of_a_long_call_come_as_they_are_made(server: RunningServer) -> None:
    long = CALL.replace("Köln", "K" * HELD_CHARS)
    chunks = list(chat(server, long, tools=[WEATHER, TIME], stream=True))
    parts = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or []]
    assert len(parts) > 5
    assert parts[0].function.name == "get_weather"
    [call] = gathered(chunks)["calls"].values()
    assert json.loads(call["arguments"]) == {"city": f"{'K' * HELD_CHARS} 🏔"}


def said_in_one_piece(text: str) -> list[ChatAnswer]:
    """The deltas of an answer that comes at once, which is the most that one piece can have."""
    template = ChatTemplate((TEMPLATES / "hermes_think.jinja").read_text(), special_tokens={})
    dialect = Dialect(template, tokenizer())
    plan = dialect.plan("", tools=read_tools([WEATHER, TIME]), choice=ToolChoice("auto"))
    return stream_deltas(plan.reader(eager=True).read(text, [], "stop"))


def test_a_delta_has_one_part_of_one_call_and_the_name_comes_without_arguments() -> None:
    deltas = said_in_one_piece(f"<think>hm</think>I look.\n{CALL}\n{CALL_TIME}")
    assert (deltas[0].reasoning, deltas[0].reasoning_content, deltas[0].content) == ("hm", "hm", "I look.")
    parts = [part for delta in deltas for [part] in [delta.tool_calls]]  # type: ignore[misc]
    assert [(part.index, bool(part.id), part.function.arguments) for part in parts] == [
        (0, True, ""),
        (0, False, '{"city": "Köln 🏔"}'),
        (1, True, ""),
        (1, False, "{}"),
    ]


@pytest.mark.parametrize("shape", ["first of the delta", "first with the id", "as the documentation says"])
def test_the_usual_loops_over_a_stream_gather_every_call(server: RunningServer, shape: str) -> None:
    """Each of them relies on something that OpenAI's streams have."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chat(server, f"{CALL}{CALL_TIME}", tools=[WEATHER, TIME], stream=True):
        parts = chunk.choices[0].delta.tool_calls or []
        for part in parts[:1] if shape == "first of the delta" else parts:
            called = part.model_dump()["function"]
            if shape == "first with the id" and part.id:
                calls[len(calls)] = {**called, "arguments": ""}
            elif shape == "first with the id":
                calls[len(calls) - 1]["arguments"] += called["arguments"]
            else:
                calls.setdefault(part.index, dict(called))["arguments"] += called["arguments"]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == [
        ("get_weather", {"city": "Köln 🏔"}),
        ("get_time", {}),
    ]


def test_the_client_gathers_a_stream_of_calls_itself(server: RunningServer) -> None:
    tools: Any = [{**tool, "function": {**tool["function"], "strict": False}} for tool in (WEATHER, TIME)]
    long = CALL.replace("Köln", "K" * HELD_CHARS)
    with server.client().chat.completions.stream(
        model="scripted", messages=[{"role": "user", "content": f"say:I look.{long}{CALL_TIME}"}], tools=tools
    ) as stream:
        parts = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        [choice] = stream.get_final_completion().choices
    assert len(parts) > 5
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []] == [
        ("get_weather", {"city": f"{'K' * HELD_CHARS} 🏔"}),
        ("get_time", {}),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [f"<think>I look.\n{CALL}\n{CALL_TIME}", f"<think>I look.{CALL}{CALL_TIME}</think>"])
def test_calls_at_the_end_of_a_reasoning_are_found(server: RunningServer, said: str, *, stream: bool) -> None:
    answer = chat(server, said, tools=[WEATHER, TIME], stream=stream)
    if stream:
        found = gathered(answer)
        names = [call["name"] for call in found["calls"].values()]
        told = (found["reasoning"], found["content"], found["reason"])
    else:
        message = answer.choices[0].message
        names = [call.function.name for call in message.tool_calls]
        told = (message.reasoning_content, message.content or "", answer.choices[0].finish_reason)
    assert (names, told) == (["get_weather", "get_time"], ("I look.", "", "tool_calls"))


def test_a_call_that_was_only_considered_is_reasoning(server: RunningServer) -> None:
    choice = chat(server, f"<think>Perhaps {CALL}? No.</think>It is noon.", tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is noon.")
    assert choice.message.model_extra["reasoning_content"] == f"Perhaps {CALL}? No."


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_gets_a_text(server: RunningServer, *, stream: bool) -> None:
    said, text = '{"name": "sql", "arguments": {"input": "SELECT \\"ü\\""}}', 'SELECT "ü"'
    body = {
        "messages": [{"role": "user", "content": f"say:<tool_call>{said}</tool_call>{CALL_TIME}"}],
        "tools": [{"type": "custom", "custom": {"name": "sql"}}, TIME],
        "stream": stream,
    }
    answer = server.post("/v1/chat/completions", body)
    lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    messages = [line["choices"][0]["delta"] for line in lines] if stream else [answer.json()["choices"][0]["message"]]
    first, second, *more = (call for message in messages for call in message.get("tool_calls", ()))
    for part in more:
        second["function"]["arguments"] += part["function"]["arguments"]
    assert (first["type"], first["custom"]) == ("custom", {"name": "sql", "input": text})
    assert (second["type"], second["function"]) == ("function", {"name": "get_time", "arguments": "{}"})
    first.pop("index", None)
    turns = [
        *body["messages"],
        {"role": "assistant", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": first["id"], "content": "7"},
    ]
    tokens = server.post("/tokenize", {"messages": turns, "tools": body["tools"]}).json()["tokens"]
    assert said in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


@pytest.mark.parametrize("broken", ['<tool_call>{"name": 3}</tool_call>', "<tool_call>so", "<tool_"])
def test_what_is_no_call_is_content(server: RunningServer, broken: str) -> None:
    choice = chat(server, f"See {broken}", tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (f"See {broken}", "stop")
    assert choice.message.tool_calls is None
    found = gathered(chat(server, f"See {broken}", tools=[WEATHER], stream=True))
    assert (found["content"], found["calls"], found["reason"]) == (f"See {broken}", {}, "stop")


def test_without_tools_or_with_none_nothing_is_called(server: RunningServer) -> None:
    assert chat(server, CALL).choices[0].message.content == CALL
    choice = chat(server, CALL, tools=[WEATHER], tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


def test_one_call_at_most_where_parallel_ones_are_not_wanted(server: RunningServer) -> None:
    calls = (
        chat(server, CALL + CALL_TIME, tools=[WEATHER, TIME], parallel_tool_calls=False).choices[0].message.tool_calls
    )
    assert [call.function.name for call in calls] == ["get_weather"]


def test_a_call_that_the_limit_cuts_off_says_so(server: RunningServer) -> None:
    choice = chat(server, CALL, tools=[WEATHER], max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content == CALL.encode()[:60].decode()
    found = gathered(chat(server, CALL, tools=[WEATHER], max_tokens=60, stream=True))
    assert (found["reason"], found["content"], found["calls"]) == ("length", choice.message.content, {})
    long = CALL.replace("Köln", "K" * HELD_CHARS)
    found = gathered(chat(server, long, tools=[WEATHER], max_tokens=HELD_CHARS + 80, stream=True))
    assert (found["reason"], found["calls"][0]["name"]) == ("length", "get_weather")


def test_the_next_turn_sees_tools_calls_and_results(server: RunningServer) -> None:
    call = chat(server, CALL, tools=[WEATHER]).choices[0].message
    turns = [
        {"role": "user", "content": "say:x"},
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "cold"},
        {"role": "user", "content": "say:ok"},
    ]
    tokens = server.post("/tokenize", {"messages": turns, "tools": [WEATHER]}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert '"name": "get_weather", "parameters"' in text
    assert CALL in text
    assert "<tool_response>\ncold\n</tool_response>" in text
    without = server.post("/tokenize", {"messages": turns, "tools": [WEATHER], "tool_choice": "none"}).json()
    assert without["count"] < len(tokens)


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "absent"}}},
            "tool_choice",
            "'absent', which is not in tools: get_weather",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two functions"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"type": "object", "properties": {"x": {"type": "objekt"}}},
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
            "objekt",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "required", "guided_json": {"type": "object"}},
            "tool_choice",
            "one or the other",
        ),
    ],
)
def test_a_bad_request_for_tools_names_its_field(
    server: RunningServer, more: dict[str, Any], param: str, words: str
) -> None:
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **more})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens_are_read_and_other_special_tokens_not_shown(
    lfm2: RunningServer, stream: bool
) -> None:
    said = "⟦tool_call_start⟧[get_weather(city='Köln 🏔'), get_time()]⟦tool_call_end⟧Wait⟦other⟧."
    answer = chat(lfm2, said, tools=[WEATHER, TIME], stream=stream)
    if stream:
        found = gathered(answer)
        content, reason = found["content"], found["reason"]
        calls = [(call["name"], call["arguments"]) for call in found["calls"].values()]
    else:
        choice = answer.choices[0]
        content, reason = choice.message.content, choice.finish_reason
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert (content, reason) == ("Wait.", "tool_calls")
    assert calls == [("get_weather", '{"city": "Köln 🏔"}'), ("get_time", "{}")]


@pytest.mark.parametrize("flag", ["tool_parser", "reasoning_parser"])
def test_a_server_whose_parser_is_unknown_does_not_start(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} 'klingon' is unknown.*auto, none"):
        ServerConfig(**{flag: "klingon"}).check()
