"""Bad input of every kind: the status, and an error in OpenAI's shape that names the field."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import RunningServer, eventually
from tests.server.scripted_engine import EOS, MAX_MODEL_LEN, VOCAB_SIZE

FACTORY = "build_paced"
SERVER = {"max_body_mb": 1, "max_answer_logprobs": 200}
ENGINE = {"max_num_seqs": 4, "max_queued_requests": 8}

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "x-request-id" in response.headers
    return dict(body["error"])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "a",}',
        b'{"prompt": ' + b"[" * 5000,
        b'{"prompt": "\\ud80"}',
    ],
)
def test_what_is_not_a_json_object_is_refused(server: RunningServer, raw: bytes) -> None:
    response = httpx.post(server.url + COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    error = error_of(response)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {}, "prompt", "missing"),
        (COMPLETIONS, {"prompt": 3}, "prompt", "got int"),
        (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": ["a", 3]}, "prompt", "prompt[1]"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "prompt[0]"),
        (COMPLETIONS, {"prompt": [[1, 2.5]]}, "prompt", "prompt[0]"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "bool"),
        (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, "prompt", str(VOCAB_SIZE - 1)),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt", "token"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "-1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "x"}, "max_tokens", "expected int, got str"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "expected int, got float"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "got bool"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "-1"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "got str"),
        (COMPLETIONS, {"prompt": "a", "temperature": -0.5}, "temperature", "-0.5"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, "top_p", "1.5"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k", "-2"),
        (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p", "2"),
        (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "above"),
        (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "3"),
        (COMPLETIONS, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty", "-3"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "0"),
        (COMPLETIONS, {"prompt": "a", "n": 10**9}, "n", "at most"),
        (COMPLETIONS, {"prompt": "a", "seed": 10**40}, "seed", "seed"),
        (
            COMPLETIONS,
            {"prompt": "a", "seed": 2**64},
            "seed",
            "at least -9223372036854775808 and at most 1844674407370955",
        ),
        (COMPLETIONS, {"prompt": "a", "priority": 10**12}, "priority", "priority"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 50}, "logprobs", "50"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs", "bool"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop[0]", "got int"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "empty"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 65}, "stop", "65"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", str(VOCAB_SIZE)),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "got str"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "101"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias", "got str"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        (COMPLETIONS, {"prompt": "a", "stop": "x" * 5000}, "stop", "4096"),
        (COMPLETIONS, {"prompt": "a", "cache_boundaries": [10**30]}, "cache_boundaries[0]", "expected int <="),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "x" * 2000}, "cache_salt", "1024"),
        (COMPLETIONS, {"prompt": "a", "request_id": "x" * 2000}, "request_id", "256"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 5, "max_tokens": 2}, "min_tokens", "5"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "stream"),
        (
            COMPLETIONS,
            {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "got int",
        ),
        (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        (CHAT, {}, "messages", "missing"),
        (CHAT, {"messages": []}, "messages", "empty"),
        (CHAT, {"messages": "hi"}, "messages", "got str"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got int"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "str"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT, {"messages": HI, "logprobs": 3}, "logprobs", "expected bool"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", str(MAX_MODEL_LEN)),
        (
            CHAT,
            {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude",
        ),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        (CHAT, {"messages": HI, "chat_template_kwargs": 3}, "chat_template_kwargs", "got int"),
        ("/tokenize", {}, "prompt", "missing"),
        ("/tokenize", {"prompt": 3}, "prompt", "got int"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages", "both"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "got str"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens", str(VOCAB_SIZE)),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "empty"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", str(VOCAB_SIZE)),
        (
            COMPLETIONS,
            {"prompt": "a", "allowed_token_ids": [97], "guided_regex": "a"},
            "allowed_token_ids",
            "guided_regex",
        ),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [64], "bad_words": ["a"]}, "allowed_token_ids", "bad_words"),
        (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids", "min_tokens"),
        (CHAT, {"messages": HI, "bad_words": ["  "]}, "bad_words", "visible"),
        (CHAT, {"messages": HI, "bad_words": ["x"] * 600}, "bad_words", "512"),
        (CHAT, {"messages": HI, "bad_words": ["x" * 300]}, "bad_words", "256"),
        (CHAT, {"messages": HI, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        (
            CHAT,
            {"messages": HI, "truncate_prompt_tokens": 9, "truncation_side": "right"},
            "truncation_side",
            COMPLETIONS,
        ),
        (CHAT, {"messages": HI, "truncation_side": "middle"}, "truncation_side", "middle"),
    ],
)
def test_a_wrong_value_names_its_field(server: RunningServer, path: str, body: Any, param: str, words: str) -> None:
    error = error_of(server.post(path, body))
    assert error["param"] == param
    assert words in error["message"]
    assert param in error["message"] or param in ("prompt", "messages")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("json_schema", {}),
        ("grammar", "root ::= x"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("best_of", 3),
        ("suffix", "end"),
        ("use_beam_search", True),
        ("chat_template", "{{ x }}"),
        ("background", True),
        ("prompt_embeds", "AAAA"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_not_served_is_refused_by_name(server: RunningServer, path: str, name: str, value: Any) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    error = error_of(server.post(path, {**body, name: value}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tool_choice", "required"), ("include_reasoning", False), ("prediction", {"type": "content", "content": "x"})],
)
def test_what_belongs_to_a_chat_is_refused_by_name_elsewhere(server: RunningServer, name: str, value: Any) -> None:
    error = error_of(server.post(COMPLETIONS, {"prompt": "a", name: value}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert CHAT in error["message"]


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ("text", "prediction", "expected object"),
        ({}, "prediction.type", "'content'"),
        ({"type": "content"}, "prediction.content", "text or a list of text parts"),
        ({"type": "content", "content": 3}, "prediction.content", "text or a list"),
        (
            {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "prediction.content[0]",
            "'image_url'",
        ),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, "b"]}, "prediction.content[1]", "'b'"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text", "must be text"),
        ({"type": "content", "content": "x" * (MAX_MODEL_LEN + 1)}, "prediction", "--max-model-len"),
        ({"type": "content", "content": "x" * (40 * MAX_MODEL_LEN)}, "prediction", "the prediction has"),
    ],
)
def test_a_prediction_that_is_no_text_or_too_long_is_refused_by_name(
    server: RunningServer, value: Any, param: str, words: str
) -> None:
    error = error_of(server.post(CHAT, {"messages": HI, "prediction": value}))
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "param", "words"),
    [
        ("response_format", {"type": "xml"}, "response_format.type", "xml"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema.schema", "missing"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}},
            "response_format.json_schema.schema",
            "objekt",
        ),
        ("response_format", "json", "response_format", "expected object"),
        ("structured_outputs", {"json": {}, "regex": "a"}, "structured_outputs", "json and regex"),
        ("structured_outputs", {"whitespace_pattern": " "}, "structured_outputs", "nothing"),
        ("structured_outputs", {"structural_tag": "x"}, "structured_outputs.structural_tag", "not JSON"),
        (
            "structured_outputs",
            {"structural_tag": {"structures": []}},
            "structured_outputs.structural_tag.structures",
            "missing",
        ),
        (
            "response_format",
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "objekt"}}},
            "response_format",
            "objekt",
        ),
        ("structured_outputs", {"choice": "yes"}, "structured_outputs.choice", "array"),
        ("structured_outputs", {"regex": 3}, "structured_outputs.regex", "got int"),
        ("guided_json", "{", "guided_json", "not JSON"),
        ("guided_json", {"type": "object", "if": {}}, "guided_json", "if"),
        ("guided_regex", "(a", "guided_regex", "unclosed"),
        ("guided_choice", [], "guided_choice", "empty"),
        ("guided_grammar", "start: nothing", "guided_grammar", "nothing"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_grammar_that_cannot_be_is_refused_before_anything_runs(
    server: RunningServer, path: str, field: str, value: Any, param: str, words: str
) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    error = error_of(server.post(path, {**body, field: value, "stream": True}))
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_what_cannot_be_combined_names_one_of_the_two(server: RunningServer, body: Any, param: str) -> None:
    assert error_of(server.post(CHAT, {"messages": HI, **body}))["param"] == param


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("documents", [{"text": "d"}])])
def test_what_this_templates_chat_cannot_do_is_refused_by_name(server: RunningServer, name: str, value: Any) -> None:
    assert error_of(server.post(CHAT, {"messages": HI, name: value}))["param"] == name


def test_what_asks_for_nothing_is_no_error(server: RunningServer) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "store": False,
        "parallel_tool_calls": True,
        "audio": None,
        "reasoning_effort": "none",
        "n": 1,
        "echo": False,
        "top_logprobs": 0,
        "model": "",
        "max_tokens": -1,
    }
    turns = [{"role": "user", "content": "say:a"}]
    assert server.post(CHAT, {"messages": turns, **nothing}).status_code == 200


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "is a picture"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "input_audio"),
    ],
)
def test_parts_that_are_not_text_are_refused(server: RunningServer, part: dict[str, Any], named: str) -> None:
    error = error_of(server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}))
    assert error["param"] == "messages[0].content[0]"
    assert named in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_gets_both_numbers(server: RunningServer, stream: bool) -> None:
    error = error_of(server.post(COMPLETIONS, {"prompt": "x" * 3000, "stream": stream}))
    assert error["code"] == "context_length_exceeded"
    assert "3000" in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]
    over = error_of(server.post(COMPLETIONS, {"prompt": "x" * 2000, "min_tokens": 100, "max_tokens": 100}))
    assert over["param"] == "max_tokens"
    assert "2000" in over["message"]
    assert str(MAX_MODEL_LEN) in over["message"]


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(server: RunningServer) -> None:
    """All of it would be tokens for a minute, were it as long as a body may be."""
    for body, path, field in (
        ({"prompt": "x" * 90_000}, COMPLETIONS, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 90_000}]}, CHAT, "messages"),
    ):
        error = error_of(server.post(path, body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert f"first {16 * MAX_MODEL_LEN} are" in error["message"]
        assert f"{MAX_MODEL_LEN} tokens (--max-model-len)" in error["message"]
    assert server.post("/tokenize", {"prompt": "x" * 90_000}).json()["count"] == 90_000


def test_one_bad_prompt_of_several_runs_none(server: RunningServer) -> None:
    assert eventually(lambda: server.running() == 0)
    before = server.metric("generation_tokens_total")
    error_of(server.post(COMPLETIONS, {"prompt": ["sing", "x" * 3000, "sing"], "max_tokens": 48}))
    server.post(COMPLETIONS, {"prompt": "say:later", "max_tokens": 1})  # numbers are younger than the refusal then
    assert eventually(lambda: server.metric("generation_tokens_total") > before and server.running() == 0)
    assert server.metric("generation_tokens_total") == before + 1


def test_more_than_the_queue_could_ever_hold_is_refused_for_good(server: RunningServer) -> None:
    error = error_of(server.post(COMPLETIONS, {"prompt": ["sing"] * 3, "n": 3}))
    assert "9 sequences" in error["message"]
    assert "limits.max_queued_requests" in error["message"]


def test_what_the_queue_has_no_room_for_is_turned_away_and_told_when_to_come_back(server: RunningServer) -> None:
    body = {"prompt": ["sing"] * 8, "max_tokens": 2000}
    with (
        server.ends_early(8 * 2000),
        httpx.Client(base_url=server.url, timeout=30) as client,
        client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as running,
    ):
        assert running.status_code == 200
        assert eventually(lambda: server.running() == 8)
        response = server.post(COMPLETIONS, body)
    error = error_of(response, 503)
    assert error["code"] == "queue_full"
    assert "limits.max_queued_requests" in error["message"]
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": []}),
    ],
)
def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(
    server: RunningServer, path: str, body: Any
) -> None:
    error = error_of(server.post(path, {**body, "model": "gpt-9"}), 404)
    assert (error["type"], error["code"], error["param"]) == ("not_found_error", "model_not_found", "model")
    assert "gpt-9" in error["message"]
    assert "'scripted'" in error["message"]
    assert "'default'" in error["message"]


def test_the_openai_client_raises_its_own_errors(server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HI)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="scripted", messages=HI, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_wrong_methods_and_paths_are_said_in_the_same_shape(server: RunningServer) -> None:
    wrong_method = server.get(CHAT)
    error = error_of(wrong_method, 405)
    assert "POST" in error["message"]
    assert "POST" in wrong_method.headers["allow"]
    assert "/v1/chat/completions" in error_of(server.post("/v1/chat"), 404)["message"]
    assert error_of(server.get("/v1/chat/completions/"), 404)["code"] == "unknown_path"
    assert error_of(server.post("/v1/moderations", {"input": "x"}), 404)["code"] == "unknown_path"


def test_a_body_that_is_too_large_is_refused_with_the_limit(server: RunningServer) -> None:
    error = error_of(server.post(COMPLETIONS, {"prompt": "x" * 1_100_000}), 413)
    assert "1000000" in error["message"]
    assert "limits.max_body_mb" in error["message"]

    def chunks() -> Any:
        yield b'{"prompt": "'
        for _ in range(12):
            yield b"x" * 100_000

    response = httpx.post(server.url + COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    error_of(response, 413)


def test_a_body_that_is_not_declared_as_json_is_refused(server: RunningServer) -> None:
    response = httpx.post(server.url + COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert "application/json" in error_of(response, 415)["message"]


def test_garbage_on_the_wire_does_not_hurt_the_server(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for garbage in (
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(garbage)
    assert server.post(COMPLETIONS, {"prompt": "say:ok"}).json()["choices"][0]["text"] == "ok"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "say:a", "logprobs": 4, "max_tokens": 10, "n": 5}, "logprobs"),
        (COMPLETIONS, {"prompt": ["say:a"] * 5, "logprobs": 4, "max_tokens": 10}, "logprobs"),
        (COMPLETIONS, {"prompt": [1] * 60, "logprobs": 3, "max_tokens": 1, "echo": True, "stream": True}, "logprobs"),
        (COMPLETIONS, {"prompt": [1] * 60, "prompt_logprobs": 3, "max_tokens": 1}, "prompt_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 4, "max_tokens": 10, "n": 5}, "top_logprobs"),
    ],
)
def test_an_answer_with_too_many_logprobs_is_refused(
    server: RunningServer, path: str, body: dict[str, Any], field: str
) -> None:
    error = error_of(server.post(path, body))
    assert (error["code"], error["param"]) == ("too_many_logprobs", field)
    assert "limits.max_answer_logprobs" in error["message"]
    assert field in error["message"]


def test_a_stream_has_no_bound_on_the_logprobs_of_its_answers(server: RunningServer) -> None:
    body = {"prompt": "say:a", "logprobs": 4, "max_tokens": 10, "n": 5}
    assert server.post(COMPLETIONS, body | {"stream": True}).status_code == 200
    assert server.post(COMPLETIONS, body | {"n": 4}).status_code == 200
