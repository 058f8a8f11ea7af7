"""Slips that are said in words: unknown paths and models, unknown fields, fields that have no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.running import RunningServer, running_server
from weft.server.protocol import did_you_mean

SERVER = {"log_format": "json", "served_model_name": ["Qwen3.5-4B", "small"]}
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "say:a"}]
MESSAGE = {"max_tokens": 5, "messages": HI}


@pytest.fixture(scope="module")
def strict(model_directory: Path) -> Iterator[RunningServer]:
    with running_server("build", engine={"model": str(model_directory)}, server={"strict_fields": True}) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "meant", "words"),
    [
        ("/chat/completions", CHAT, "base URL of OpenAI's clients is {url}/v1, with /v1"),
        ("/responses/resp_1/input_items", "/v1/responses/resp_1/input_items", "with /v1"),
        ("/v1/v1/chat/completions", "", "/v1 twice; the base URL is {url}/v1"),
        ("/v1/v1/messages", "/v1/messages", "base URL of Anthropic's clients is {url}/, without /v1"),
        ("/v1/chat/completion", CHAT, "/v1/models"),
        ("/v1/completions/", "/v1/completions", "/openapi.json"),
        ("/v1/mesages", "/v1/messages", "/v1/responses"),
    ],
)
def test_an_unknown_path_says_what_was_meant_and_what_is_served(
    server: RunningServer, path: str, meant: str, words: str
) -> None:
    answer = server.post(path, {})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert f"there is nothing at {path}" in message
    assert words.format(url=server.url) in message
    assert CHAT in message
    assert f"did you mean {meant}?" in message if meant else "did you mean" not in message


def test_the_clients_say_what_is_wrong_with_their_base_url(server: RunningServer) -> None:
    import anthropic  # here: it has 3,200 modules, two seconds of each worker

    with pytest.raises(openai.NotFoundError, match="with /v1") as missing:
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0).chat.completions.create(
            model="small", messages=[{"role": "user", "content": "hi"}]
        )
    assert missing.value.code == "unknown_path"
    with pytest.raises(anthropic.NotFoundError, match="without /v1") as twice:
        anthropic.Anthropic(base_url=f"{server.url}/v1", api_key="none", max_retries=0).messages.create(
            model="small", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
        )
    body: Any = twice.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == twice.value.response.headers["x-request-id"]


def test_a_wrong_method_is_an_error_of_the_paths_dialect(server: RunningServer) -> None:
    answer = server.get("/v1/messages")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["type"] == "error"
    assert server.get(CHAT).json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_an_unknown_model_is_answered_with_the_names_and_the_one_that_was_meant(
    server: RunningServer, path: str
) -> None:
    answer = server.post(path, {**MESSAGE, "model": "qwen3.5-4b"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert "(did you mean Qwen3.5-4B?)" in message
    assert "this server has 'Qwen3.5-4B', 'small', 'default'" in message
    assert "did you mean" not in server.get("/v1/models/gpt-5").json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "user": "me"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/responses", {"input": "say:a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_an_unknown_field_is_named_by_a_header_and_refused_by_a_strict_server(
    server: RunningServer, strict: RunningServer, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, {**body, "max_token": 3})
    assert (answer.status_code, answer.headers["x-weft-ignored"]) == (200, "max_token")
    refused = strict.post(path, {**body, "max_token": 3})
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert "the field max_token is unknown" in error["message"]
    assert "server.strict_fields" in error["message"]
    if not path.startswith("/v1/messages"):
        assert (error["param"], error["code"]) == ("max_token", "unknown_field")
    allowed = strict.post(path, body)
    assert (allowed.status_code, "x-weft-ignored" in allowed.headers) == (200, False)


def test_streams_large_bodies_and_odd_names_are_told_too(server: RunningServer) -> None:
    body = {"messages": [*HI], "stream": True, "max_token": 1, "odd\r\nname: x": 2, "store": True}
    assert server.post(CHAT, body).headers["x-weft-ignored"] == "max_token, ?, store"
    large = {"prompt": "say:a", "max_token": 1, "stop": None, "x" * 70: "y" * 2_000_000}
    assert server.post("/v1/completions", large).headers["x-weft-ignored"] == "max_token, ?"
    many = {"messages": HI, **{f"field{number}": 1 for number in range(50)}}
    assert len(server.post(CHAT, many).headers["x-weft-ignored"].split(", ")) == 16
    assert "x-weft-ignored" not in server.post(CHAT, {"messages": HI}).headers


def test_thinking_without_a_model_that_reasons_is_said(server: RunningServer) -> None:
    on, off = {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}
    left_out = server.post("/v1/messages", {**MESSAGE, "thinking": on}).headers["x-weft-ignored"]
    assert left_out.split(", ") == ["thinking.budget_tokens", "thinking"]
    assert "x-weft-ignored" not in server.post("/v1/messages", {**MESSAGE, "thinking": off}).headers


def test_the_log_has_the_field_and_one_warning(model_directory: Path) -> None:
    with running_server("build", engine={"model": str(model_directory)}, server=SERVER) as running:
        for _ in range(3):
            running.post(CHAT, {"messages": HI, "max_token": 3})
        running.post(CHAT, {"messages": HI})
        running.interrupt()
        assert running.exit_code() == 0
        output = running.rest_of_output()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [one.get("ignored") for one in lines if one.get("path") == CHAT] == [["max_token"]] * 3 + [None]
    assert output.count("the field max_token is unknown (did you mean max_tokens?) and was ignored") == 1


def test_only_a_close_name_is_meant() -> None:
    assert did_you_mean("Temprature", ["temperature", "top_p"]) == " (did you mean temperature?)"
    assert did_you_mean("foo", ["temperature", "top_p"]) == ""
