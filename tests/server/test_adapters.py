"""Adapters over HTTP: in each dialect by their names, loaded and unloaded by operators, found by no other."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.adapters import factors, variants, written
from tests.fixtures.checkpoints import checkpoint
from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer, running_server
from weft.server.page import page_files

OPERATOR = {"Authorization": "Bearer operator-key-of-a-test"}
MESSAGES = [{"role": "user", "content": "The fox and the hare went out."}]


def make_adapter(directory: Path, seed: int, *, rank: int = 4) -> Path:
    tensors = {}
    for layer in range(4):
        tensors |= factors(f"model.layers.{layer}.mlp.down_proj", 64, 96, rank=rank, seed=seed + layer)
    return written(directory, tensors, r=rank, lora_alpha=4 * rank)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[RunningServer]:
    engine = {
        "model": str(checkpoint("qwen3_5")),
        "memory": "16MB",
        "threads": 1,
        "max_model_len": 512,
        "lora": [f"first={make_adapter(home / 'first', 1)}"],
    }
    with running_server("", engine=engine, server={"operator_key": ["operator-key-of-a-test"]}) as running:
        yield running


def complete(server: RunningServer, model: str, **more: Any) -> httpx.Response:
    return server.post(
        "/v1/completions",
        {
            "model": model,
            "prompt": list(range(3, 203)),
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        },
    )


def tokens(server: RunningServer, model: str) -> tuple[list[int], int]:
    """The answer, and how many prompt tokens were cached."""
    answer = complete(server, model)
    assert answer.is_success, answer.text
    said = answer.json()
    assert said["model"] == (model if model != "default" else said["model"])
    return (list(said["choices"][0]["token_ids"]), int(said["usage"]["prompt_tokens_details"]["cached_tokens"]))


def load(server: RunningServer, name: str, path: Path, **more: Any) -> httpx.Response:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}, headers=OPERATOR)


def test_a_name_picks_the_adapter_and_nothing_is_shared(server: RunningServer) -> None:
    assert server.post("/v1/cache/flush", headers=OPERATOR).is_success
    base, _ = tokens(server, "default")
    adapted, cached = tokens(server, "first")
    assert adapted != base
    assert cached == 0
    again, cached = tokens(server, "first")
    assert again == adapted
    assert cached > 0


def test_models_lists_adapters_with_their_base(server: RunningServer) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    [base] = [card["id"] for card in cards.values() if card["parent"] is None]
    assert cards["first"]["parent"] == base
    assert server.get("/v1/models/first").json()["parent"] == base


def _text(value: Any) -> str:
    return json.dumps(value)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_each_dialect_answers_with_the_adapter(server: RunningServer, path: str) -> None:
    limits = {
        "/v1/responses": {"input": MESSAGES, "max_output_tokens": 16},
        "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 16, "temperature": 0}},
    }.get(path, {"messages": MESSAGES, "max_tokens": 16})
    answers = []
    for model in ("default", "first"):
        answer = server.post(
            path, {"model": model, "temperature": 0, **limits} if path != "/api/chat" else {"model": model, **limits}
        )
        assert answer.is_success, answer.text
        said = answer.json()
        answers.append(
            _text(
                (said.get("choices") and said["choices"][0]["message"]["content"])
                or (said.get("output") and said["output"][-1]["content"][0]["text"])
                or said.get("content")
                or said.get("message")
            )
        )
    assert answers[0] != answers[1]


def test_an_operator_loads_other_files_under_one_name_and_nothing_stale_is_found(
    server: RunningServer, home: Path
) -> None:
    """vllm 42125: a reused name answered from the prefix of the files before."""
    path = make_adapter(home / "changing", 50)
    assert load(server, "changing", path).status_code == 200
    first, _ = tokens(server, "changing")
    assert tokens(server, "changing")[1] > 0
    make_adapter(path, 90)
    assert load(server, "changing", path, load_inplace=True).status_code == 200
    second, cached = tokens(server, "changing")
    assert cached == 0
    assert second != first
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "changing"}, headers=OPERATOR)
    assert gone.status_code == 200
    assert complete(server, "changing").status_code == 404
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "changing"}, headers=OPERATOR).status_code == 404


def test_only_operators_change_the_names(server: RunningServer, home: Path) -> None:
    asked = {"lora_name": "mine", "lora_path": str(home / "first")}
    assert server.post("/v1/load_lora_adapter", asked).status_code in (401, 403)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "first"}).status_code in (401, 403)
    assert tokens(server, "first")[0], "the name is still there"


def test_without_an_operator_key_a_path_tells_nothing_about_files(model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with running_server("build", engine={"model": str(model_directory)}) as server:
        texts = {
            server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)}).json()["error"]["message"]
            for path in (tmp_path / "empty", tmp_path / "nowhere")
        }
    assert {text.replace("empty", "nowhere") for text in texts} == {min(texts).replace("empty", "nowhere")}
    assert "is not an adapter that this server can read" in min(texts)


def test_a_bad_adapter_is_refused_with_one_line_and_the_server_is_unhurt(server: RunningServer, home: Path) -> None:
    large = make_adapter(home / "large", 5, rank=100)
    nothing = written(home / "nothing", factors("model.layers.0.mlp.middle_proj", 64, 96))
    for path, words in (
        (home / "missing", "no such directory"),
        (large, "limits.max_lora_rank"),
        (nothing, "middle_proj"),
    ):
        refused = load(server, "bad", path)
        assert refused.status_code == 400, refused.text
        message = refused.json()["error"]["message"]
        assert words in message
        assert "\n" not in message
    assert complete(server, "bad").status_code == 404
    assert tokens(server, "first")[0]


def test_ollama_lists_and_shows_an_adapter_as_a_model_of_its_own(server: RunningServer) -> None:
    listed = {card["name"]: card for card in server.get("/api/tags").json()["models"]}
    [base] = set(listed) - {"first"}
    assert listed["first"]["digest"] != listed[base]["digest"]
    assert listed["first"]["details"]["parent_model"] == base
    assert server.post("/api/show", {"model": "first:latest"}).json()["modelfile"] == (f"FROM {base}\nADAPTER first")


def test_embeddings_are_the_adapters(server: RunningServer) -> None:
    """On any model: states behind the last token, by each name."""
    base, adapted = (
        server.post("/v1/embeddings", {"model": name, "input": "the fox"}).json()["data"][0]["embedding"]
        for name in ("default", "first")
    )
    assert len(base) == len(adapted)
    assert base != adapted


def test_the_page_lets_one_choose_the_adapter_that_answers(server: RunningServer, tmp_path: Path) -> None:
    if CHROMIUM is None:
        warnings.warn("no Chromium: adapters on the page were not tried in a browser", stacklevel=1)
        assert "listModels()" in page_files()["models.js"].read_text("utf-8")
        return
    said = [
        server.post(
            "/v1/chat/completions",
            {"model": name, "messages": [{"role": "user", "content": "the fox"}], "temperature": 0, "max_tokens": 8},
        ).json()["choices"][0]["message"]["content"]
        for name in ("default", "first")
    ]
    browser = Browser(CHROMIUM, tmp_path, width=1100)
    try:
        browser.open(server.url)
        browser.run(
            "document.getElementById('settings').open = true; document.getElementById("
            "'temperature').value = '0'; document.getElementById('max-tokens').value = '8'"
        )
        browser.wait_for("!document.getElementById('model-choice').hidden")
        for at, name in enumerate(("", "first")):
            if name:
                browser.run(f"document.getElementById('model-name').value = '{name}'")
            browser.run("document.getElementById('new').click(); document.getElementById('ask').focus()")
            browser.type("the fox")
            browser.press("Enter", 13)
            answer = "document.querySelector('#talk .answer')"
            browser.wait_for(f"{answer} && document.getElementById('stop').hidden")
            # Drawn as Markdown, where a tab at the beginning makes code of it.
            assert said[at].strip("\t\n ") in browser.run(f"{answer}.textContent")
        browser.run(
            "document.getElementById('key').value = 'operator-key-of-a-test';"
            "document.getElementById('key-form').requestSubmit()"
        )
        browser.run("location.hash = '#server'")
        browser.wait_for("document.getElementById('adapters').textContent.startsWith('Adapters: ')")
    finally:
        browser.close()
    assert said[0] != said[1]


def metric(server: RunningServer, name: str) -> float:
    text = server.get("/metrics", headers=OPERATOR).text
    [line] = [line for line in text.splitlines() if line.startswith(f"weft:{name}{{")]
    return float(line.split()[-1])


def test_metrics_count_the_adapters(server: RunningServer) -> None:
    tokens(server, "first")
    assert metric(server, "lora_adapters") >= 1


def test_a_thousand_names_are_served_with_ten_in_memory(home: Path, tmp_path: Path) -> None:
    paths = variants(make_adapter(home / "shared", 7), tmp_path, 1000)
    engine = {
        "model": str(checkpoint("qwen3_5")),
        "memory": "32MB",
        "threads": 1,
        "max_model_len": 4096,
        "speculate": "off",
        "lora": [f"{name}={path}" for name, path in paths.items()],
        "lora_memory": "280KiB",
    }
    with running_server("", engine=engine, server={"operator_key": ["operator-key-of-a-test"]}) as server:
        assert metric(server, "lora_adapters") == 10
        assert len(server.get("/v1/models").json()["data"]) == 1001
        asked = [f"n{37 * at % 1000}" for at in range(1, 25)]
        with ThreadPoolExecutor(7) as pool:  # n0 runs beside all others
            long = pool.submit(complete, server, "n0", max_tokens=1500)
            answers = list(pool.map(lambda name: tokens(server, name)[0], asked))
        assert metric(server, "lora_evictions_total") >= 14
        assert metric(server, "lora_adapters") <= 10
        assert metric(server, "lora_bytes") <= metric(server, "lora_budget_bytes")
        again = [tokens(server, name)[0] for name in (asked[0], asked[-1])]
        assert again == [answers[0], answers[-1]]
        assert len({tuple(one) for one in answers}) >= 4, "they are adapters of their own"
        beside = long.result().json()["choices"][0]["token_ids"]
        assert beside == complete(server, "n0", max_tokens=1500).json()["choices"][0]["token_ids"]
