"""Tools, reasoning and structured output of ``Engine.chat``: the server's answers, from an engine that
says what the prompt asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted_engine import build, write_model_directory
from tests.server.test_tools import CALL, TEMPLATES, TIME, WEATHER, stop_at_end
from weft import Engine
from weft.assemble import Assembled
from weft.config import EngineConfig
from weft.errors import RequestError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    directory = write_model_directory(tmp_path_factory.mktemp("hermes"), template=template)
    with pytest.MonkeyPatch.context() as patch, scripted(patch, directory) as engine:
        yield engine


def scripted(patch: pytest.MonkeyPatch, directory: Path) -> Engine:
    def assemble(config: EngineConfig, *, on_progress: object) -> Assembled:
        return build(config, on_progress=lambda text: None)

    patch.setattr("weft.api.engine.assemble", assemble)
    return Engine(str(directory))


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"say:{text}"}]


def rendering(engine: Engine, messages: list[dict[str, Any]], **fields: Any) -> str:
    return engine.tokenizer.decode(engine.render_chat(messages, **fields), skip_special_tokens=False)


def test_a_call_comes_apart_from_the_content(engine: Engine) -> None:
    reply = engine.chat(say(f"<think>cold?</think>I look. {CALL}"), tools=[WEATHER, TIME])
    assert (reply.text.strip(), reply.reasoning, reply.finish_reason) == ("I look.", "cold?", "tool_calls")
    [call] = reply.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln 🏔"})
    assert call.id


def test_the_reply_is_a_message_of_the_next_turn(engine: Engine) -> None:
    messages = say(CALL)
    reply = engine.chat(messages, tools=[WEATHER])
    messages.append(reply.message)
    messages.append({"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "4 degrees"})
    rendered = rendering(engine, messages, tools=[WEATHER])
    assert "get_weather" in rendered
    assert "Köln" in rendered
    assert "4 degrees" in rendered


def test_a_stream_brings_the_parts_as_they_come(engine: Engine) -> None:
    pieces = list(engine.stream_chat(say(f"<think>cold?</think>I look. {CALL}"), tools=[WEATHER]))
    assert "".join(piece.text for piece in pieces).strip() == "I look."
    assert "".join(piece.reasoning for piece in pieces) == "cold?"
    calls = [delta for piece in pieces for delta in piece.calls]
    assert [delta.name for delta in calls if delta.name] == ["get_weather"]
    assert json.loads("".join(delta.arguments for delta in calls)) == {"city": "Köln 🏔"}
    assert pieces[-1].finish_reason == "stop"


def test_stop_strings_end_the_answer_and_not_the_reasoning(engine: Engine) -> None:
    reply = engine.chat(say("<think>\nQ: 2?\n</think>\n\nIt is 4. Q: 3?"), stop=["Q:"])
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("It is 4. ", "Q: 2?", "stop")


def test_without_tools_the_same_text_is_content(engine: Engine) -> None:
    reply = engine.chat(say(CALL))
    assert (reply.text, reply.tool_calls, reply.finish_reason) == (CALL, [], "stop")
    assert reply.message == {"role": "assistant", "content": CALL}


def test_the_template_sees_the_tools(engine: Engine) -> None:
    assert "get_weather" not in rendering(engine, say("x"))
    assert "get_weather" in rendering(engine, say("x"), tools=[WEATHER])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function is missing"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_choice": ["a"]}, "cannot be combined"),
    ],
)
def test_wrong_tools_are_named_as_on_the_server(engine: Engine, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine.chat(say("x"), **fields)


def test_a_template_that_reads_no_tools_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(monkeypatch, write_model_directory(tmp_path)) as engine:
        with pytest.raises(RequestError, match="tools is not supported"):
            engine.chat(say("x"), tools=[WEATHER])
        assert engine.chat(say("x")).text == "x"


def test_a_budget_of_reasoning_needs_markers_that_are_tokens(engine: Engine) -> None:
    with pytest.raises(RequestError, match="thinking_token_budget is not served with this model"):
        engine.chat(say("<think>cold?</think>Yes."), thinking_token_budget=5)
    with pytest.raises(RequestError, match="thinking_token_budget is -1"):
        engine.chat(say("Yes."), thinking_token_budget=-1)
