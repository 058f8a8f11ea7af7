"""Sampling of requests that name no values, by every API: the engine answers with the values that reached it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from weft.cli.chat import Conversation, converse
from weft.cli.remote import RemoteModel
from weft.default_sampling import read_default_sampling, sampling_sentence
from weft.errors import ConfigError

ASKED = [{"role": "user", "content": "sampling?"}]
OLLAMA, OPENAI = "0.8 40 0.9", "1.0 0 1.0"
GREEDY = "0.0 40 0.9"


def _server(directory: Path, **engine: Any) -> Any:
    factory = engine.pop("factory", "build_unadvised")
    store = {"name_store": str(directory / "names.json")}
    return running_server(factory, engine={"model": str(write_model_directory(directory)), **engine}, server=store)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with _server(tmp_path_factory.mktemp("unadvised")) as running:
        yield running


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with _server(tmp_path_factory.mktemp("chosen"), default_sampling="temperature=0.3,top_k=7") as running:
        yield running


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The checkpoint says temperature 0, against the flag."""
    with _server(tmp_path_factory.mktemp("advised"), factory="build", default_sampling="temperature=0.3") as running:
        yield running


def ollama_answers(server: RunningServer, **more: Any) -> set[str]:
    body = {"model": "scripted", "stream": False, **more}
    return {
        server.post("/api/chat", {**body, "messages": ASKED}).json()["message"]["content"],
        server.post("/api/generate", {**body, "prompt": "sampling?"}).json()["response"],
        server.post("/api/generate", {**body, "prompt": "sampling?", "raw": True}).json()["response"],
    }


def other_answers(server: RunningServer, **more: Any) -> set[str]:
    limit = {"max_tokens": 40, **more}
    return {
        server.post("/v1/chat/completions", {"messages": ASKED, **limit}).json()["choices"][0]["message"]["content"],
        server.post("/v1/completions", {"prompt": "sampling?", **limit}).json()["choices"][0]["text"],
        server.post("/v1/responses", {"input": "sampling?", **more}).json()["output"][0]["content"][0]["text"],
        server.post("/v1/messages", {"model": "scripted", "messages": ASKED, **limit}).json()["content"][0]["text"],
    }


def chat_answer(server: RunningServer, name: str | None = None, **fields: Any) -> str:
    """The answer that `weft chat` shows."""
    written: list[str] = []
    lines = iter(["sampling?"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    with closing(RemoteModel(server.url, model=name)) as model:
        converse(model, Conversation(), fields, read=read, write=written.append)
    return "".join(written).partition("\n")[0]


def test_where_nobody_says_ollamas_api_and_weft_chat_have_ollamas_defaults_and_the_others_their_own(
    server: RunningServer,
) -> None:
    assert ollama_answers(server) == {OLLAMA}
    assert chat_answer(server) == OLLAMA
    assert other_answers(server) == {OPENAI}


def test_each_value_of_a_request_wins_by_itself(server: RunningServer) -> None:
    assert ollama_answers(server, options={"temperature": 0.1}) == {"0.1 40 0.9"}
    assert chat_answer(server, top_k=3) == "0.8 3 0.9"
    assert other_answers(server, top_p=0.5) == {"1.0 0 0.5"}


def test_the_flag_sets_the_defaults_of_every_api(chosen: RunningServer) -> None:
    assert other_answers(chosen) == {"0.3 7 1.0"}
    assert ollama_answers(chosen) == {"0.3 7 0.9"}  # a value that it leaves out stays the API's
    assert chat_answer(chosen) == "0.3 7 0.9"


def test_the_checkpoints_word_stands_above_the_flag(advised: RunningServer) -> None:
    assert ollama_answers(advised) == {GREEDY}
    assert chat_answer(advised) == GREEDY
    assert other_answers(advised) == {"0.0 0 1.0"}


def test_a_created_name_stands_above_the_flag_in_weft_chat_too(chosen: RunningServer) -> None:
    parameters = {"temperature": 0.25, "num_predict": 5}
    made = chosen.post("/api/create", {"model": "warm", "from": "scripted", "parameters": parameters, "stream": False})
    assert made.status_code == 200
    assert chat_answer(chosen, "warm") == "0.25 "  # and its limit, before that of weft chat


def test_the_start_says_what_requests_are_sampled_with(
    server: RunningServer, chosen: RunningServer, advised: RunningServer
) -> None:
    own = "temperature 0.8, top_p 0.9, top_k 40 in Ollama's API, the page and `weft chat`"
    assert own in server.output
    assert "temperature 1, top_p 1, top_k 0 in the other APIs" in server.output
    assert "temperature 0.3, top_k 7 (--default-sampling); top_p 0.9 in Ollama's API" in chosen.output
    assert "sampling where a request does not say: temperature 0 (checkpoint)\n" in advised.output


def test_the_list_of_models_shows_the_values_of_a_chat(server: RunningServer, advised: RunningServer) -> None:
    [card] = server.get("/v1/models").json()["data"]
    assert card["chat_sampling"] == {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    [card] = advised.get("/v1/models").json()["data"]
    assert card["chat_sampling"] == {"temperature": 0.0, "top_k": 40, "top_p": 0.9}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("ollama", {"temperature": 0.8, "top_k": 40, "top_p": 0.9}),
        ("openai", {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        ("ollama, temperature = 0.5", {"temperature": 0.5, "top_k": 40, "top_p": 0.9}),
        ("min_p=0.05,presence_penalty=-1", {"min_p": 0.05, "presence_penalty": -1.0}),
        (None, {}),
    ],
)
def test_a_set_and_single_values_may_be_given(text: str | None, values: dict[str, float]) -> None:
    assert read_default_sampling(text) == values


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("olama", "--default-sampling has 'olama': it may be ollama, openai or NAME=VALUE"),
        ("temperatur=1", "did you mean temperature=VALUE"),
        ("temperature", "did you mean temperature=VALUE"),
        ("temperature=hot", "temperature is 'hot'; it must be a number"),
        ("top_k=1.5", "top_k is '1.5'; it must be a whole number"),
        ("top_p=2", "top_p is 2"),
        ("", "has ''"),
        ("max_tokens=3", "has 'max_tokens=3'"),
    ],
)
def test_a_wrong_default_is_refused_in_one_line(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_default_sampling(text)
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.param == "--default-sampling"


def test_values_that_the_checkpoint_has_are_not_said_to_be_the_flags() -> None:
    said = sampling_sentence({"temperature": 0.6}, {"temperature": 0.6, "top_k": 5})
    assert "temperature 0.6 (checkpoint); top_k 5 (--default-sampling); top_p 0.9 in" in said
