"""Ollama's API with its own Python client: answers, streams, thinking, calls, options, models, errors.

The engine says what the prompt tells it to, one byte per token, so every marker arrives in pieces.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import ollama
import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from tests.server.test_messages import CALL
from tests.server.test_tools import TEMPLATES, stop_at_end

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    template = template.replace("{{- '<think>\\n\\n</think>\\n\\n' }}", "")  # the script would repeat it
    directory = write_model_directory(tmp_path_factory.mktemp("hermes"), template=template)
    with running_server("build_paced", engine={"model": str(directory)}) as running:
        yield running


def client(server: RunningServer, **more: Any) -> ollama.Client:
    return ollama.Client(host=server.url, **more)


def said(say: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"say:{say}"}]


def ask(server: RunningServer, say: str, **more: Any) -> Any:
    return client(server).chat(model="scripted", messages=said(say), **more)


def stream(server: RunningServer, say: str, **more: Any) -> list[Any]:
    return list(client(server).chat(model="scripted", messages=said(say), stream=True, **more))


def test_a_chat_is_answered_whole_and_streamed_alike(server: RunningServer) -> None:
    whole = ask(server, "Grüße 🏔")
    assert (whole.message.role, whole.message.content) == ("assistant", "Grüße 🏔")
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "scripted")
    lines = stream(server, "Grüße 🏔")
    assert len(lines) > 3
    assert "".join(line.message.content for line in lines) == "Grüße 🏔"
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == whole.eval_count == len("Grüße 🏔".encode()) + 1
    assert lines[-1].prompt_eval_count == whole.prompt_eval_count > 8
    for last in (lines[-1], whole):
        assert last.total_duration >= last.eval_duration >= 5_000_000 > 0, "six steps of 1 ms and more"


def test_a_stream_is_lines_of_json_without_being_asked_for(server: RunningServer) -> None:
    """As ``curl -d`` sends it: with the type of a form."""
    answer = httpx.post(
        f"{server.url}/api/generate",
        timeout=30,
        content=json.dumps({"model": "scripted:latest", "prompt": "say:abc"}),
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["response"] for line in lines) == "abc"
    assert [line["done"] for line in lines].count(True) == 1
    show = httpx.post(
        f"{server.url}/api/show",
        content=json.dumps({"model": "scripted"}),
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert show.status_code == 200, show.text
    other = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=b"{}",
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert other.status_code == 415, "the control: no other API takes that"


def test_each_line_is_a_chunk_of_its_own(server: RunningServer) -> None:
    """Clients that parse each chunk as JSON (genkit) fail where the last text and the end come together."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    body = json.dumps({"model": "scripted", "messages": said("abcdef"), "options": {"num_predict": 3}})
    connection.request("POST", "/api/chat", body, {"Connection": "close"})
    answer = connection.getresponse()
    chunks = re.split(rb"\r\n[0-9a-f]+\r\n", b"\r\n" + answer.fp.read())[1:]
    lines = [json.loads(chunk) for chunk in chunks[:-1]]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) > 1
    assert chunks[-1] == b"\r\n", "the end of the chunks"


def test_an_answer_goes_on_from_its_context(server: RunningServer) -> None:
    first = client(server).generate(model="scripted", prompt="say:ab", system="Be brief.")
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    alone = client(server).generate(model="scripted", prompt="say:cd")
    more = client(server).generate(model="scripted", prompt="say:cd", context=first.context)
    assert more.prompt_eval_count == len(first.context) + alone.prompt_eval_count
    assert list(more.context[: more.prompt_eval_count]) == [*first.context, *alone.context[: alone.prompt_eval_count]]
    *_, last = client(server).generate(model="scripted", prompt="say:cd", context=first.context, stream=True)
    assert list(last.context) == list(more.context)
    raw = client(server).generate(model="scripted", prompt="say:cd", raw=True)
    assert (raw.context, ask(server, "cd").model_dump().get("context")) == (None, None)


def test_thinking_comes_apart_from_the_answer_and_can_be_left_out(server: RunningServer) -> None:
    text = "<think>\nhm, well\n</think>\n\nYes."
    whole = ask(server, text, think=True)
    assert (whole.message.thinking.strip(), whole.message.content) == ("hm, well", "Yes.")
    lines = stream(server, text, think=True)
    assert "".join(line.message.thinking or "" for line in lines).strip() == "hm, well"
    assert "".join(line.message.content for line in lines) == "Yes."
    assert ask(server, text, think=False).message.thinking is None
    generated = client(server).generate(model="scripted", prompt=f"say:{text}", think=True)
    assert (generated.thinking.strip(), generated.response) == ("hm, well", "Yes.")
    with pytest.raises(ollama.ResponseError, match="think is 'much'"):
        ask(server, text, think="much")


def test_a_call_comes_whole_and_its_result_goes_back(server: RunningServer) -> None:
    for message in (
        ask(server, CALL, tools=[WEATHER]).message,
        next(line.message for line in stream(server, CALL, tools=[WEATHER]) if line.message.tool_calls),
    ):
        [call] = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Köln 🏔"})
        assert message.content == ""
    back = client(server).chat(
        model="scripted",
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Köln"}}}],
            },
            {"role": "tool", "tool_name": "get_weather", "content": "12 °C"},
            *said("cold"),
        ],
    )
    assert back.message.content == "cold"


def test_options_and_formats_have_the_effect_that_they_have_there(server: RunningServer) -> None:
    for length in (2, 2.0):
        cut = ask(server, "abcdef", options={"num_predict": length})
        assert (cut.message.content, cut.done_reason) == ("ab", "length")
    with pytest.raises(ollama.ResponseError, match=r"options\.num_predict: Expected int"):
        ask(server, "abcdef", options={"num_predict": 2.5})
    assert ask(server, "one two", options={"stop": [" two"]}).message.content == "one"
    assert ask(server, "abcdef", options={"num_predict": -1}).message.content == "abcdef"
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert set(json.loads(ask(server, '{"a": 7}', format=schema).message.content)) == {"a"}
    assert isinstance(json.loads(ask(server, '{"b": 7}', format="json").message.content), dict)
    drawn = [
        client(server)
        .generate(model="scripted", prompt="sing", options={"seed": seed, "temperature": 1.0, "num_predict": 20})
        .response
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_has_no_effect_is_named_and_a_prompt_is_never_cut(server: RunningServer) -> None:
    body = {
        "model": "scripted",
        "messages": said("a"),
        "stream": False,
        "keep_alive": "5m",
        "options": {"num_gpu": 1, "mirostat": 2, "num_ctx": 4096},
    }
    answer = httpx.post(f"{server.url}/api/chat", json=body, timeout=30)
    assert answer.status_code == 200
    assert answer.headers["x-weft-ignored"].split(", ") == ["keep_alive", "options.num_gpu", "options.mirostat"]
    with pytest.raises(ollama.ResponseError, match=r"num_ctx is 5; this server drops no part") as caught:
        ask(server, "abcdefgh", options={"num_ctx": 5})
    assert caught.value.status_code == 400


def test_a_raw_prompt_passes_no_template(server: RunningServer) -> None:
    plain = client(server).generate(model="scripted", prompt="say:abc", raw=True)
    templated = client(server).generate(model="scripted", prompt="say:abc")
    assert plain.response == templated.response == "abc"
    assert plain.prompt_eval_count == len("say:abc") < templated.prompt_eval_count
    with pytest.raises(ollama.ResponseError, match="system goes into the chat template"):
        client(server).generate(model="scripted", prompt="say:a", raw=True, system="You are.")


def test_models_are_listed_shown_and_loaded(server: RunningServer) -> None:
    [listed] = client(server).list().models
    assert (listed.model, len(listed.digest)) == ("scripted", 64)
    shown = client(server).show("scripted:latest")
    assert set(shown.capabilities) == {"completion", "tools", "thinking"}
    assert any(name.endswith(".context_length") for name in shown.modelinfo)
    [running] = client(server).ps().models
    assert running.model == "scripted"
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2
    assert client(server).generate(model="scripted").done_reason == "load"
    assert client(server).chat(model="scripted", keep_alive=0).done_reason == "unload"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "other", "messages": said("a")}, 404, "there is no model 'other'"),
        ("/api/chat", {"messages": said("a")}, 400, "model is missing"),
        (
            "/api/chat",
            {"model": "scripted", "messages": [said("a")[0] | {"images": ["AA=="]}]},
            400,
            "messages[0].images[0] is a picture; this model reads text only",
        ),
        ("/api/generate", {"model": "scripted", "prompt": "a", "images": ["AA=="]}, 400, "reads text only"),
        ("/api/generate", {"model": "scripted", "prompt": "a", "context": [1, 9_999]}, 400, "token 9999; this"),
        ("/api/generate", {"model": "scripted", "prompt": "a", "context": [1], "raw": True}, 400, "context continues"),
        (
            "/api/generate",
            {"model": "scripted", "prompt": "a", "context": [1], "images": ["AA=="]},
            400,
            "images together with context",
        ),
        ("/api/generate", {"model": "scripted", "prompt": "a", "format": "yaml"}, 400, "format is 'yaml'"),
        ("/api/generate", {"model": "scripted", "prompt": "a", "format": "csv"}, 400, "format is 'csv'"),
        ("/api/generate", {"model": "scripted", "prompt": "a", "options": {"top_k": "much"}}, 400, "options.top_k"),
        ("/api/generate", {"model": "scripted", "prompt": "a", "options": {"temperature": -1}}, 400, "temperature"),
        ("/api/push", {"model": "other"}, 404, "of Ollama's API this server has neither /api/push"),
        ("/api/pull", {"model": "maker/tiny", "stream": False}, 503, "the hub https://huggingface.co cannot be"),
        ("/api/pull", {"stream": False}, 400, "model is missing"),
        ("/api/create", {"model": "x", "from": "scripted"}, 400, "keeps no created names"),
        ("/api/copy", {"source": "scripted", "destination": "x"}, 400, "(server.name_store off)"),
    ],
)
def test_an_error_is_one_line_in_the_clients_shape(
    server: RunningServer, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = httpx.post(server.url + path, json=body, timeout=30)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_a_pull_without_a_hub_says_so_in_one_line(server: RunningServer) -> None:
    """Servers of tests have HF_HUB_OFFLINE."""
    first, last = server.post("/api/pull", {"model": "maker/tiny"}).text.splitlines()
    assert json.loads(first) == {"status": "pulling manifest"}
    assert set(json.loads(last)) == {"error"}
    assert "cannot be reached" in last


@pytest.mark.parametrize("name", ["default", "scripted", "scripted:latest"])
def test_a_pull_of_a_served_name_needs_no_hub(server: RunningServer, name: str) -> None:
    """mem0 and others pull a name that ``/api/tags`` does not show, and ``default`` is none of its names."""
    assert client(server).pull(name).status == "success"
    assert [line.status for line in client(server).pull(name, stream=True)] == ["success"]


def test_several_calls_have_an_index_each(server: RunningServer) -> None:
    """Clients that join the parts of a stream tell calls by it."""
    twice = f"{CALL}\n{CALL}"
    calls = [call for line in stream(server, twice, tools=[WEATHER]) for call in line.message.tool_calls or ()]
    raw = server.post(
        "/api/chat", {"model": "scripted", "stream": False, "messages": said(twice), "tools": [WEATHER]}
    ).json()["message"]["tool_calls"]
    assert len(calls) == len(raw) == 2
    assert [call["function"]["index"] for call in raw] == [0, 1]
    assert len({call["id"] for call in raw}) == 2


def test_a_page_of_another_site_and_a_wrong_key_are_refused(tmp_path: Path) -> None:
    engine = {"model": str(write_model_directory(tmp_path))}
    with running_server("build", engine=engine, server={"api_key": ["a-key"]}) as guarded:
        body = json.dumps({"model": "scripted", "prompt": "say:a"})
        kinds = {"content-type": "text/plain", "origin": "http://evil.example"}
        assert httpx.post(f"{guarded.url}/api/generate", content=body, headers=kinds).status_code == 403
        assert httpx.get(f"{guarded.url}/api/tags").status_code == 401
        answer = client(guarded, headers={"Authorization": "Bearer a-key"}).generate("scripted", "say:abc")
        assert answer.response == "abc"
