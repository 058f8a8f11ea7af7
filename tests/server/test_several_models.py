"""Several models behind one address: swaps under load, faults of one of them, names in every dialect."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import ollama
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import CHAT_TEMPLATE, write_model_directory
from tests.support.gguf_files import write_gguf
from tests.support.given_costs import GIVEN_COSTS
from weft.api.engine import Engine
from weft.cli.top import read_metrics
from weft.config import EngineConfig
from weft.host import GPU_CONTEXT_BYTES, GPU_STEP_BYTES
from weft.models.hub import resolve_model
from weft.planning.residency import Resident
from weft.server import sources
from weft.server.config import ServerConfig
from weft.server.launch import EXIT_OK
from weft.server.models import ListedModel
from weft.server.on_demand import OnDemandModel
from weft.server.page import page_files
from weft.server.served_model import load_served_model
from weft.server.sources import read_sources

PROMPTS = [list(range(3 + 7 * seed, 163 + 7 * seed)) for seed in range(3)]


def states(server: RunningServer) -> dict[str, str]:
    return {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}


def say(server: RunningServer, model: str, text: str = "say:hello", **more: Any) -> httpx.Response:
    return server.post(
        "/v1/chat/completions",
        {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 40, **more},
    )


def metric(server: RunningServer, name: str, model: str) -> float:
    line = next(
        line
        for line in server.get("/metrics").text.splitlines()
        if line.startswith(f"weft:{name}{{") and f'model_name="{model}"' in line
    )
    return float(line.rpartition(" ")[2])


# ---------------------------------------------------------------------- real models, one at a time


def alone(name: str) -> list[list[int]]:
    """The answers to PROMPTS by this model, which no other one disturbs."""
    with Engine(str(checkpoint(name)), memory="2MB", threads=1, max_model_len=512) as engine:
        return [answer.tokens for answer in engine.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)]


def test_swaps_under_load_change_no_token_and_prefixes_come_back_from_the_store(tmp_path: Path) -> None:
    small = resolve_model(write_gguf(checkpoint("lfm2"), tmp_path / "small.gguf"))  # the same weights
    models = ("big=" + str(checkpoint("qwen3_5")), f"small={small}")
    engine = {
        "memory": "3MB",
        "threads": 1,
        "max_model_len": 512,
        "store": str(tmp_path / "store"),
        "store_size": "64MB",
        "store_reserve": "1MB",
        "step_costs": GIVEN_COSTS,
    }
    expected = {"big": alone("qwen3_5"), "small": alone("lfm2")}
    assert all(big != small for big, small in zip(expected["big"], expected["small"], strict=True)), (
        "the control: an answer of the other model would be noticed"
    )
    with running_server("", engine=engine, models=models) as server:
        assert "at most 1 of them at once" in server.output
        client = server.client()

        def answer(model: str, at: int) -> tuple[list[int], int]:
            said = client.completions.create(
                model=model,
                prompt=PROMPTS[at],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            details = said.usage.prompt_tokens_details
            return said.choices[0].token_ids, details.cached_tokens

        asked = [(model, at) for at in range(len(PROMPTS)) for model in ("big", "small")]
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(lambda one: answer(*one), asked))
        assert [tokens for tokens, _ in answers] == [expected[model][at] for model, at in asked]
        answers = [answer("big", 0), answer("small", 1), answer("big", 0)]
        assert [tokens for tokens, _ in answers] == [expected["big"][0], expected["small"][1], expected["big"][0]]
        assert [cached > 0 for _, cached in answers] == [True] * 3, "each was unloaded in between"
        assert metric(server, "store_restored_tokens_total", "big") > 0
        loads = {name: metric(server, "model_loads_total", name) for name in ("big", "small")}
        assert min(loads.values()) >= 2
        assert metric(server, "model_memory_bytes", "big") <= 3_000_000
        assert metric(server, "engine_restarts_total", "big") == 0, "an audit that failed would be one"
        assert "error" not in server.output.lower()


MIXED = ("qwen3_5", "falcon_h1", "xlstm")
"""A delta rule, Mamba-2 beside attention, a matrix memory."""


def test_six_requests_at_once_to_models_of_three_families_are_answered_as_by_each_alone() -> None:
    expected = {name: alone(name)[:2] for name in MIXED}
    assert len({tuple(answers[0]) for answers in expected.values()}) == len(MIXED), (
        "the control: an answer of another model would be noticed"
    )
    engine = {"memory": "18MB", "threads": 1, "max_model_len": 512}
    with running_server("", engine=engine, models=tuple(f"{name}={checkpoint(name)}" for name in MIXED)) as server:
        client = server.client()

        def answer(model: str, at: int) -> list[int]:
            said = client.completions.create(
                model=model,
                prompt=PROMPTS[at],
                max_tokens=12,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            return said.choices[0].token_ids

        asked = [(model, at) for at in range(2) for model in MIXED]
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(lambda one: answer(*one), asked))
        assert answers == [expected[model][at] for model, at in asked]
        assert [metric(server, "engine_restarts_total", name) for name in MIXED] == [0] * len(MIXED)


# ---------------------------------------------------------------------- scripted engines


def scripted(directory: Path, name: str, **config: Any) -> str:
    """A model whose template writes its name, with the config.json of a real one for its needs."""
    folder = directory / name
    folder.mkdir()
    write_model_directory(folder, template=CHAT_TEMPLATE.replace("LOUD", f"LOUD {name}"))
    (folder / "config.json").write_text((checkpoint("qwen3_5") / "config.json").read_text())
    return f"{name}={folder}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[RunningServer]:
    """Room for two of three; ``broken`` has no tokenizer."""
    models = (scripted(home, "one"), scripted(home, "two"), scripted(home, "broken"))
    (home / "broken" / "tokenizer.json").unlink()
    engine = {"memory": "6MB", "max_model_len": 512, "max_queued_requests": 8}
    with running_server(
        "build_paced", engine=engine, models=models, server={"operator_key": ["operator-key-of-a-test"]}
    ) as running:
        yield running


def test_models_are_loaded_when_they_are_asked_for_and_lists_say_which_are(server: RunningServer) -> None:
    assert server.get("/health").json()["status"] == "ok"
    assert say(server, "one").json()["model"] == "one"
    assert states(server)["one"] == "loaded"
    client = ollama.Client(host=server.url)
    assert {model.model for model in client.list().models} == {"one", "two", "broken"}
    assert "one" in {model.model for model in client.ps().models}
    architecture = {"absent": "qwen3_5", "loaded": "scripted"}[states(server)["two"]]
    assert client.show("two").modelinfo["general.architecture"] == architecture, "of its files, or of its engine"
    assert server.get("/v1/models/default").json()["id"] == "one"
    assert server.get("/health").json()["models"]["loaded"] >= 1
    running = read_metrics(server.get("/metrics", headers={"Authorization": "Bearer operator-key-of-a-test"}).text, 0.0)
    assert running.values["model_loaded"] >= 1
    assert set(running.engines) == {"one", "two", "broken"}, "weft top has a row for each"


def test_every_dialect_picks_the_model_by_its_name(server: RunningServer) -> None:
    hello = [{"role": "user", "content": "say:hello"}]
    chat = {"messages": hello, "max_tokens": 40}
    bodies = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "say:hello", "max_tokens": 40},
        "/v1/responses": {"input": "say:hello", "store": False},
        "/v1/messages": chat,
        "/api/chat": {"messages": hello, "stream": False},
        "/v1/embeddings": {"input": "hello"},
        "/api/generate": {"prompt": "say:hello", "stream": False},
        "/api/embed": {"input": "hello"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
    }
    for model in ("one", "two"):
        for path, body in bodies.items():
            answer = server.post(path, {"model": model, **body})
            said = answer.json()
            assert said.get("model") == model or "score" in path, (path, answer.text)
    unknown = say(server, "twoo")
    assert unknown.status_code == 404
    assert "did you mean two" in unknown.json()["error"]["message"]
    for name in ("one", "two", "broken", "default"):
        assert repr(name) in unknown.json()["error"]["message"]


def test_a_model_that_does_not_load_fails_its_requests_alone(server: RunningServer) -> None:
    say(server, "one")
    first = say(server, "broken")
    assert first.status_code == 503
    assert first.json()["error"]["code"] == "model_load_failed"
    assert "'broken' does not load" in first.json()["error"]["message"]
    assert int(first.headers["retry-after"]) >= 1
    again = say(server, "broken")
    assert again.status_code == 503
    assert "tried again in" in again.json()["error"]["message"]
    assert say(server, "one").status_code == 200
    assert states(server)["broken"] == "failed"
    reasons = {card["id"]: card.get("reason") for card in server.get("/v1/models").json()["data"]}
    assert reasons["broken"]
    assert reasons["one"] is None, "a model that answers has no reason"


def test_a_killed_engine_of_one_model_does_not_hurt_the_other(server: RunningServer) -> None:
    for name in ("one", "two"):
        assert say(server, name).status_code == 200
    pids = children(server.process.pid)
    assert len(pids) == 2
    texts: dict[str, str] = {}

    def stream(model: str) -> None:
        parts = server.client().chat.completions.create(
            model=model, messages=[{"role": "user", "content": "sing"}], max_tokens=400, stream=True
        )
        texts[model] = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    threads = [threading.Thread(target=stream, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    assert eventually(lambda: server.running() == 2)
    os.kill(pids[0], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert texts["one"] == texts["two"] != ""
    assert (
        sum(
            server.get("/metrics", headers={"Authorization": "Bearer operator-key-of-a-test"}).text.count(
                f'engine_restarts_total{{engine="0",model_name="{name}"}} 1.0'
            )
            for name in ("one", "two")
        )
        == 1
    )


def children(pid: int) -> list[int]:
    """Its engine processes, oldest first."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if b"weft.rpc.engine_process" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_the_page_shows_each_model_and_asks_the_chosen_one(server: RunningServer, tmp_path: Path) -> None:
    if CHROMIUM is None:
        warnings.warn("no Chromium: several models on the page were not tried in a browser", stacklevel=1)
        assert "drawModels(" in page_files()["page.js"].read_text("utf-8")
        return
    browser = Browser(CHROMIUM, tmp_path / "profile", width=1100)
    rows = "[...document.querySelectorAll('#models tr')]"
    cell = f"{rows}.find((row) => row.cells[0].textContent === 'two').cells"
    try:
        browser.open(server.url)
        browser.run(
            "document.getElementById('key').value = 'operator-key-of-a-test';"
            "document.getElementById('key-form').requestSubmit()"
        )
        browser.wait_for("document.getElementById('model').textContent === '3 models'")
        browser.run("document.getElementById('model-name').value = 'two';document.getElementById('ask').focus()")
        browser.type("say:hello")
        browser.press("Enter", 13)
        browser.wait_for("document.querySelector('#talk .answer').textContent === 'hello'")
        browser.run("location.hash = '#server'")
        browser.wait_for(f"{rows}.length === 3")
        browser.wait_for(f"{cell}[1].textContent === 'loaded' && {cell}[2].textContent !== '0 B'")
        total = browser.run("document.getElementById('models-total').textContent")
        assert re.fullmatch(r"\S+ \S+ of \S+ \S+ taken", total)
        assert "free" in browser.run("document.getElementById('models-legend').textContent"), "the bar is not full"
        assert browser.run("document.getElementById('model-name').value") == "two"
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        browser.screenshot(tmp_path / "page.png")
    finally:
        browser.close()


def test_keep_alive_unloads_and_loads(server: RunningServer) -> None:
    client = ollama.Client(host=server.url)
    client.generate("one", "say:hello", keep_alive=-1)
    assert {model.model: model.expires_at.year for model in client.ps().models}["one"] > 2300
    assert client.generate("one", keep_alive=0).done_reason == "unload"
    assert eventually(lambda: states(server)["one"] == "absent")
    assert client.generate("one", keep_alive="10m").done_reason == "load"
    assert states(server)["one"] == "loaded"
    client.generate("one", "say:hello", keep_alive=0)
    assert eventually(lambda: states(server)["one"] == "absent")
    wrong = server.post("/api/generate", {"model": "one", "prompt": "x", "keep_alive": "soon"})
    assert wrong.status_code == 400
    assert "keep_alive" in wrong.json()["error"]


OPERATOR = {"Authorization": "Bearer operator-key-of-a-test"}


def test_an_operator_names_the_model_that_sleeps_or_restarts(server: RunningServer) -> None:
    for path in ("/sleep", "/wake_up", "/pause", "/v1/replicas/restart", "/v1/replicas/0/drain"):
        unnamed = server.post(path, headers=OPERATOR)
        assert unnamed.status_code == 400, path
        assert unnamed.json()["error"]["code"] == "several_models"
        assert "?model=NAME" in unnamed.json()["error"]["message"]
        assert server.post(f"{path}?model=nine", headers=OPERATOR).status_code == 404
    for name in ("one", "two"):
        assert say(server, name).status_code == 200

    before = children(server.process.pid)
    assert server.post("/v1/replicas/restart?model=two", headers=OPERATOR).status_code == 200
    assert len(set(before) & set(children(server.process.pid))) == 1, "one of the two processes is another one"
    assert server.post("/pause?model=two", headers=OPERATOR).status_code == 200
    assert [server.get(f"/is_paused?model={name}").json()["is_paused"] for name in ("one", "two")] == [False, True]
    assert say(server, "one").status_code == 200, "the other one goes on"
    assert server.post("/resume?model=two", headers=OPERATOR).status_code == 200
    assert say(server, "two").status_code == 200
    refit = server.post("/update_weights?model=two&path=/nowhere", headers=OPERATOR)
    assert refit.status_code == 400
    assert "would have the weights of its files again" in refit.json()["error"]["message"]
    client = ollama.Client(host=server.url)
    client.generate("two", keep_alive=0)
    assert eventually(lambda: states(server)["two"] == "absent")
    gone = server.post("/pause?model=two", headers=OPERATOR)
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "not_loaded")


def test_each_model_has_replicas_that_divide_its_memory_and_a_recording_of_its_own(tmp_path: Path) -> None:
    models = scripted(tmp_path, "a"), scripted(tmp_path, "b")
    engine = {"memory": "12MB", "max_model_len": 512}
    flags = {"replicas": "2", "record": str(tmp_path / "trace.jsonl")}
    with running_server("build", models=models, engine=engine, server=flags) as server:
        assert say(server, "a").json()["choices"][0]["message"]["content"] == "hello"
        rows = server.get("/v1/replicas").json()["data"]
        assert [(row["model"], row["replica"], row["state"]) for row in rows] == [("a", 0, "ready"), ("a", 1, "ready")]
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        assert say(server, "a").status_code == 200, "the other replica answers"
        assert say(server, "b").status_code == 200
    assert list(tmp_path.glob("trace.a.1*.jsonl"))
    assert list(tmp_path.glob("trace.b.1*.jsonl"))
    assert not (tmp_path / "trace.jsonl").exists()


def test_ranks_of_a_model_that_is_loaded_on_demand_give_its_tokens() -> None:
    expected = alone("qwen3_5")[:1]
    models = ("a=" + str(checkpoint("qwen3_5")), "b=" + str(checkpoint("lfm2")))
    engine = {"memory": "16MB", "threads": 1, "max_model_len": 512, "tp": 2}
    with running_server("", engine=engine, models=models) as server:
        said = server.client().completions.create(
            model="a",
            prompt=PROMPTS[0],
            max_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert [said.choices[0].token_ids] == expected


def test_batches_name_their_models_and_adapters_their_base(tmp_path: Path) -> None:
    models = scripted(tmp_path, "a"), scripted(tmp_path, "b")
    with running_server(
        "build",
        models=models,
        engine={"memory": "3MB", "max_model_len": 512},
        server={"file_store": str(tmp_path / "files")},
    ) as server:
        client = server.client()
        lines = [
            json.dumps(
                {
                    "custom_id": f"{number}",
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": {
                        "model": "ab"[number % 2],
                        "max_tokens": 40,
                        "messages": [{"role": "user", "content": f"say:{number}"}],
                    },
                }
            )
            for number in range(8)
        ]
        source = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed", limit_s=180), (
            "two loads, which give way to whatever else this machine does"
        )
        ended = client.batches.retrieve(batch.id)
        output = ended.output_file_id
        assert output is not None, client.files.content(ended.error_file_id or "").text
        said = [json.loads(line) for line in client.files.content(output).text.splitlines()]
        assert {
            one["custom_id"]: (
                one["response"]["body"]["model"],
                one["response"]["body"]["choices"][0]["message"]["content"],
            )
            for one in said
        } == {f"{number}": ("ab"[number % 2], f"{number}") for number in range(8)}
        assert metric(server, "model_loads_total", "a") == metric(server, "model_loads_total", "b") == 1, (
            "lines of one model come together, though one model fits at a time"
        )
        wrong = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"})
        assert wrong.status_code == 400
        assert "MODEL/NAME" in wrong.json()["error"]["message"]


def test_tokenizers_are_read_before_anything_is_served(tmp_path: Path) -> None:
    """A load that read one would hold up the answers of the other models."""
    models = [scripted(tmp_path, name) for name in "abc"]
    (tmp_path / "c" / "tokenizer.json").unlink()
    sources = read_sources(models, EngineConfig(memory="6MB"), ServerConfig(), reads_weights=False)
    [known] = sources[0].tokenizers
    assert sources[1].tokenizers == (known,), "models with the same files share one"
    assert sources[2].tokenizers == (), "loading says what is wrong"
    served = load_served_model(
        OnDemandModel(sources[0], Resident("a", 1, None), Mock()).info, sources[0].server, sources[0].tokenizers
    )
    assert served.renderer.tokenizer is known


def test_the_share_of_a_model_on_a_gpu_has_room_for_its_matrices_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a CPU keeps bfloat16 in 12 bits: planned by the CPU's features, a GPU's share was a quarter too small."""
    settings = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(sources, "cpu_name_and_flags", lambda: ("", frozenset({"avx512f"})))
    needs = {}
    for device, gpus in (("cpu", ["0"]), ("auto", []), ("auto", ["0"]), ("cuda", ["0"])):
        monkeypatch.setattr(sources, "visible_gpus", lambda gpus=gpus: gpus)
        need = sources._need("m", tmp_path, EngineConfig(device=device), 1)
        needs[device, len(gpus)] = need.all_weights_bytes
    in_addition = GPU_CONTEXT_BYTES + GPU_STEP_BYTES
    assert needs["cpu", 1] == needs["auto", 0] < 0.8 * (needs["cuda", 1] - in_addition)
    assert needs["auto", 1] == needs["cuda", 1] > in_addition


def test_the_sampling_of_a_model_is_known_before_its_first_load(tmp_path: Path) -> None:
    """The page and `weft chat` send it with their first request, which loads the model."""
    models = [scripted(tmp_path, name) for name in "abc"]
    (tmp_path / "a" / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    (tmp_path / "b" / "generation_config.json").write_text("no JSON")
    engine = EngineConfig(memory="6MB", default_sampling="temperature=0.3")
    sources = read_sources(models, engine, ServerConfig(), reads_weights=False)
    infos = [OnDemandModel(source, Resident(source.name, 1, None), Mock()).info for source in sources]
    listed = [ListedModel(info.name, info, 0).chat_sampling for info in infos]
    assert listed[0] == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert listed[1] == listed[2] == {"temperature": 0.3, "top_k": 40, "top_p": 0.9}  # loading says what is wrong


def test_who_waits_for_a_load_is_bounded(home: Path) -> None:
    models = ("one=" + str(home / "one"), "two=" + str(home / "two"))
    engine = {"memory": "3MB", "max_model_len": 512, "max_queued_requests": 2}
    with running_server("build_never", models=models, engine=engine) as server, ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(say, server, "one")
        assert eventually(lambda: server.get("/load").json()["waiting"] == 2)
        full = say(server, "two")
        assert full.status_code == 503
        assert full.json()["error"]["code"] == "queue_full"
        assert "limits.max_queued_requests" in full.json()["error"]["message"]
        assert int(full.headers["retry-after"]) >= 1
        server.interrupt()
        assert eventually(lambda: server.process.poll() is not None)
        assert server.process.returncode == EXIT_OK, "a load that is cancelled is no failure of the stop"
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("engine", "server", "said"),
    [
        ({"tp": 3}, {}, "--tp is 3"),
        ({}, {"served_model_name": ("x",)}, "--served-model-name"),
        ({}, {"http_workers": 2}, "--http-workers"),
        ({"store": "no-such-store", "store_size": "20MB"}, {}, "--store-size 20MB is too small for 2 models"),
        ({"memory": "1MB"}, {}, "--memory of all models together is 977 KiB"),
        ({"lora": ["x=/nowhere"]}, {}, "MODEL/NAME=path"),
        ({}, {"keep_alive": "soon"}, "limits.keep_alive"),
    ],
)
def test_what_several_models_cannot_have_is_said_before_anything_listens(
    engine: dict[str, Any],
    server: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weft.server.launch import EXIT_CONFIG, serve

    monkeypatch.chdir(tmp_path)
    models = ("a=" + str(checkpoint("qwen3_5")), "b=" + str(checkpoint("lfm2")))
    assert serve(EngineConfig(**engine), ServerConfig(**server), models) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not Path("no-such-store").exists(), "a start that is refused makes no directory"
