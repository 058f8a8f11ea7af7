"""Names of /api/create, with Ollama's client: in every dialect and list, after a restart, in every process.

The engine says what the last ``say:`` of its prompt tells it to.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory
from tests.server.test_several_models import scripted
from tests.support.hub_server import Hub, hub_server
from weft.cli.main import main
from weft.errors import ConfigError, RequestError
from weft.models.local import holders
from weft.server.presets import TEMPLATES_MAX, Preset, PresetStore, PresetStoreError, check_preset_name
from weft.text.chat import ChatMessage

SHOUTING = "{% for message in messages %}{{ message.content.upper() }}|{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub") / "tiny"
    root.mkdir()
    (root / "config.json").write_text("{}")
    (root / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    with hub_server({"maker/tiny": root}) as running:
        yield running


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@contextlib.contextmanager
def serving(model: Path, state: Path, hub: Hub, **server: Any) -> Iterator[RunningServer]:
    """With names in a file of ``state``."""
    with running_server(
        "build",
        engine={"model": str(model)},
        server={"name_store": str(state / "names.json"), **server},
        environment={
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": hub.endpoint,
            "WEFT_MODEL_DIR": str(state / "models"),
            "XDG_CACHE_HOME": str(state / "cache"),
        },
    ) as running:
        yield running


@pytest.fixture(scope="module")
def server(model: Path, state: Path, hub: Hub) -> Iterator[RunningServer]:
    with serving(model, state, hub) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url)
    yield client
    for listed in client.list().models:
        if str(listed.model) != "scripted":
            client.delete(str(listed.model))


def prompt_of(server: RunningServer, model: str, *messages: dict[str, str], **more: Any) -> str:
    """What the model reads."""
    count = server.post("/tokenize", {"model": model, "messages": list(messages), **more}).json()
    return str(server.post("/detokenize", {"tokens": count["tokens"]}).json()["prompt"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_name_is_created_used_listed_shown_copied_and_deleted(server: RunningServer, client: ollama.Client) -> None:
    made = client.create(
        model="mario",
        from_="scripted",
        system="You are Mario.",
        license="free",
        parameters={"num_predict": 4, "stop": ["x"], "top_k": 3},
        messages=[user("hi"), {"role": "assistant", "content": "mamma mia"}],
    )
    assert made.status == "success"
    assert client.chat("mario", [user("say:abcdef")]).message.content == "abcd"
    assert client.generate("mario:latest", "say:abxdef").response == "ab"
    assert client.chat("mario", [user("say:abcdef")], options={"num_predict": 6}).message.content == "abcdef"
    assert {listed.model for listed in client.list().models} == {"scripted", "mario"}
    assert {running.model for running in client.ps().models} == {"scripted", "mario"}
    first, alone = client.generate("mario", "say:abc"), client.generate("scripted", "say:abc")
    more = client.generate("mario", "say:abc", context=first.context)
    assert first.prompt_eval_count > alone.prompt_eval_count, "it begins as the name does"
    assert more.prompt_eval_count == len(first.context) + alone.prompt_eval_count, "and does so once"
    shown = client.show("mario")
    assert shown.details is not None
    assert shown.details.parent_model == "scripted"
    assert shown.parameters is not None
    assert set(shown.parameters.splitlines()) == {"temperature 0.0", "top_k 3", "num_predict 4", 'stop "x"'}
    assert shown.modelfile is not None
    for line in ("FROM scripted", 'SYSTEM """You are Mario."""', "MESSAGE assistant mamma mia"):
        assert line in shown.modelfile.splitlines()
    assert client.copy("mario", "family/luigi:big").status == "success"
    client.delete("mario")
    assert client.chat("family/luigi:big", [user("say:abcdef")]).message.content == "abcd"
    with pytest.raises(ollama.ResponseError, match="there is no model 'mario' here"):
        client.chat("mario", [user("say:a")])
    with pytest.raises(ollama.ResponseError, match="there is no created name 'mario'"):
        client.delete("mario")


def test_a_name_begins_every_conversation_as_it_says(server: RunningServer, client: ollama.Client) -> None:
    plain = prompt_of(server, "scripted", user("now"))
    client.create(
        model="a", from_="scripted", system="SYS", messages=[user("one"), {"role": "assistant", "content": "two"}]
    )
    said = prompt_of(server, "a", user("now"))
    assert [said.find(word) for word in ("SYS", "one", "two", "now")] == sorted(
        said.find(word) for word in ("SYS", "one", "two", "now")
    )
    assert "SYS" in said
    assert "SYS" not in plain
    own = prompt_of(server, "a", {"role": "system", "content": "OWN"}, user("now"))
    assert "SYS" not in own, "a request's own system prompt stands for it"
    assert own.find("OWN") < own.find("one") < own.find("now")
    client.create(model="b", from_="a", system="OTHER")  # of a name: what it does not say stays
    assert prompt_of(server, "b", user("now")) == said.replace("SYS", "OTHER")
    client.delete("a")
    assert prompt_of(server, "b", user("now")) == said.replace("SYS", "OTHER"), "it needs no other name"
    client.create(model="c", from_="scripted", messages=[{"role": "system", "content": "SYS"}, user("one")])
    assert client.show("c").modelfile == 'FROM scripted\nSYSTEM """SYS"""\nPARAMETER temperature 0.0\nMESSAGE user one'


def test_a_name_works_through_every_dialect(server: RunningServer, client: ollama.Client) -> None:
    import anthropic  # here: it has 3,200 modules, two seconds of each worker

    client.create(model="short", from_="scripted", parameters={"num_predict": 3})
    text = "say:abcdef"
    openai = server.client()
    assert [one.id for one in openai.models.list().data] == ["scripted", "short"]
    assert openai.models.retrieve("short").model_dump()["parent"] == "scripted"
    chat = openai.chat.completions.create(model="short", messages=[{"role": "user", "content": text}])
    assert (chat.model, chat.choices[0].message.content) == ("short", "abc")
    assert openai.completions.create(model="short", prompt=text).choices[0].text == "abc"
    assert openai.responses.create(model="short", input=text).output_text == "abc"
    messages = anthropic.Anthropic(base_url=server.url, api_key="none").messages
    client.create(model="short", from_="short", parameters={"stop": "c"})
    answer = messages.create(model="short", max_tokens=9, messages=[{"role": "user", "content": text}])
    assert answer.content[0].text == "ab"  # type: ignore[union-attr]
    assert client.generate("short").done_reason == "load"


def test_a_template_of_a_name_is_a_jinja_template_and_renders_it_alone(
    server: RunningServer, client: ollama.Client
) -> None:
    client.create(model="loud", from_="scripted", template=SHOUTING)
    assert prompt_of(server, "loud", user("now")) == "NOW|"
    assert "now" in prompt_of(server, "scripted", user("now"))
    assert client.show("loud").template == SHOUTING
    for template, words in (
        ("{{ if .System }}{{ .System }}{{ end }}", "the Go templates"),
        ("Hello", "does not use messages"),
        ("{% for m in messages %}", "template: "),
    ):
        with pytest.raises(ollama.ResponseError, match=words):
            client.create(model="other", from_="scripted", template=template)


def test_num_ctx_of_a_name_bounds_prompts_and_cuts_none(server: RunningServer, client: ollama.Client) -> None:
    client.create(model="small", from_="scripted", parameters={"num_ctx": 20})
    with pytest.raises(ollama.ResponseError, match="name small has num_ctx 20; this server drops no part"):
        client.chat("small", [user("say:" + "a" * 40)])
    assert client.chat("small", [user("say:" + "a" * 40)], options={"num_ctx": 100}).message.content == "a" * 40
    for path, body in (
        ("/v1/completions", {"prompt": "a" * 40}),
        ("/v1/chat/completions", {"messages": [user("a" * 40)]}),
        ("/api/generate", {"prompt": "a" * 40, "raw": True}),
    ):
        answer = server.post(path, {"model": "small", **body})
        assert answer.status_code == 400
        assert "num_ctx 20" in answer.text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "x"}, 400, "from is missing"),
        ({"from": "scripted"}, 400, "model is missing"),
        ({"model": "x", "from": "nobody"}, 404, "there is no model 'nobody'"),
        ({"model": "scripted", "from": "scripted"}, 400, "a model of this server by itself"),
        ({"model": "default", "from": "scripted"}, 400, "a model of this server by itself"),
        ({"model": "a b", "from": "scripted"}, 400, "model is 'a b'; a name has"),
        ({"model": "../x", "from": "scripted"}, 400, "a name has letters"),
        ({"model": "a" * 201, "from": "scripted"}, 400, "at most 200 characters"),
        ({"model": "x", "from": "scripted", "files": {"a": "sha256:b"}}, 400, "and then there is no from"),
        ({"model": "x", "from": "scripted", "adapters": {"a": "sha256:b"}}, 400, "adapters is not supported"),
        ({"model": "x", "from": "scripted", "quantize": "q4_K_M"}, 400, "quantize is not supported"),
        ({"model": "x", "modelfile": "FROM scripted"}, 400, "modelfile is not supported"),
        ({"model": "x", "from": "scripted", "parameters": {"top_k": "many"}}, 400, "parameters.top_k"),
        ({"model": "x", "from": "scripted", "parameters": {"temperature": -1}}, 400, "temperature is -1"),
        (
            {"model": "x", "from": "scripted", "messages": [{"role": "tool", "content": "a"}]},
            400,
            "messages[0].role is 'tool'",
        ),
        (
            {"model": "x", "from": "scripted", "messages": [{"role": "user", "images": ["AA=="]}]},
            400,
            "messages[0].images is not supported",
        ),
    ],
)
def test_a_create_that_cannot_be_served_names_its_field(
    server: RunningServer, body: dict[str, Any], status: int, words: str
) -> None:
    answer = server.post("/api/create", body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})
    assert words in answer.json()["error"]
    assert [one["id"] for one in server.get("/v1/models").json()["data"]] == ["scripted"]


def test_parameters_without_effect_are_named(server: RunningServer, client: ollama.Client) -> None:
    answer = server.post(
        "/api/create",
        {
            "model": "x",
            "from": "scripted",
            "stream": False,
            "renderer": "a",
            "parameters": {"num_gpu": 1, "top_k": 3, "num_ctx": None},
        },
    )
    assert answer.json() == {"status": "success"}
    assert answer.headers["x-weft-ignored"].split(", ") == ["renderer", "parameters.num_gpu"]
    assert client.show("x").parameters == "temperature 0.0\ntop_k 3"


def test_what_the_server_has_by_itself_is_not_deleted(server: RunningServer) -> None:
    answer = httpx.request("DELETE", f"{server.url}/api/delete", json={"model": "scripted"})
    assert answer.status_code == 400
    assert "a model that this server serves" in answer.json()["error"]


def test_names_outlive_the_server_and_those_of_another_model_stay_hidden(
    model: Path, state: Path, hub: Hub, tmp_path: Path
) -> None:
    """Two HTTP processes: each sees what another one created, and what one of another start did."""
    file = {"name_store": str(tmp_path / "names.json")}
    with serving(model, state, hub, **file, http_workers=2) as first:
        ollama.Client(host=first.url).create(model="kept", from_="scripted", parameters={"num_predict": 2})
        for _ in range(12):  # each connection may come to either
            answer = httpx.post(
                f"{first.url}/api/chat", json={"model": "kept", "messages": [user("say:abcdef")], "stream": False}
            ).json()
            assert answer["message"]["content"] == "ab"
    assert (tmp_path / "names.json").stat().st_mode & 0o777 == 0o600
    store = PresetStore(tmp_path / "names.json", count_max=9, bytes_max=9999)
    for name, of in (("alien", "elsewhere"), ("own", "scripted")):
        store.put(Preset(name=name, model=of, created_s=1.0, parameters={"num_predict": 1}))
    with serving(
        model,
        state,
        hub,
        **file,
        api_key=["a-key"],
        operator_key=["the-operators"],
        served_model_name=["scripted", "own"],
    ) as second:
        keys = {"headers": {"Authorization": "Bearer a-key"}}
        listed = second.get("/api/tags", **keys).json()["models"]
        assert [one["name"] for one in listed] == ["scripted", "own", "kept"]
        own = second.post("/api/chat", {"model": "own", "messages": [user("say:abc")], "stream": False}, **keys)
        assert own.json()["message"]["content"] == "abc", "the server's own names win"
        answer = second.post("/api/chat", {"model": "alien", "messages": [user("a")]}, **keys)
        assert answer.status_code == 404
        assert "was created from 'elsewhere', which this server does not have" in answer.json()["error"]
        for path in ("/api/create", "/api/copy", "/api/pull"):  # and who may call them
            assert second.post(path, {}, **keys).status_code == 403
            assert second.post(path, {}, headers={"Authorization": "Bearer the-operators"}).status_code == 400
        assert httpx.request("DELETE", f"{second.url}/api/delete", json={"model": "kept"}, **keys).status_code == 403


def test_a_name_of_one_of_several_models_loads_and_unloads_that_one(tmp_path: Path) -> None:
    models = scripted(tmp_path, "one"), scripted(tmp_path, "two")
    with running_server(
        "build",
        engine={"memory": "6MB", "max_model_len": 512},
        models=models,
        server={"name_store": str(tmp_path / "names.json")},
    ) as several:
        client = ollama.Client(host=several.url)
        client.create(model="mario", from_="two", parameters={"num_predict": 3})
        assert client.show("mario").modelfile == "FROM two\nPARAMETER num_predict 3"
        cards = several.get("/v1/models").json()["data"]
        assert [(one["id"], one["state"], one["parent"]) for one in cards] == [
            ("one", "absent", None),
            ("two", "absent", None),
            ("mario", "absent", "two"),
        ]
        assert list(client.ps().models) == [], "nothing was loaded for that"
        assert client.generate("mario").done_reason == "load"
        assert [one.model for one in client.ps().models] == ["two", "mario"]
        assert client.chat("mario", [user("say:abcdef")]).message.content == "abc"
        assert client.chat("two", [user("say:abcdef")]).message.content == "abcdef"
        assert client.chat("mario", keep_alive=0).done_reason == "unload"
        assert eventually(lambda: list(client.ps().models) == [])
        with pytest.raises(ollama.ResponseError, match="this server has 'one', 'two', 'mario', 'default'"):
            client.chat("nobody", [user("a")])


def test_a_pull_tells_of_its_progress_and_its_model_can_be_deleted(state: Path, client: ollama.Client) -> None:
    lines = list(client.pull("hf.co/maker/tiny:latest", stream=True))
    assert lines[0].status == "pulling manifest"
    assert lines[-1].status == "success"
    assert lines[-2].status == "on disk; `weft serve maker/tiny` serves it"
    files = {line.digest: line for line in lines if line.digest}
    assert len(files) == 2
    assert all(line.completed == line.total for line in files.values())
    assert sorted(line.total or 0 for line in files.values()) == [2, 256 * 4096]
    assert (state / "models" / "maker--tiny" / "config.json").exists()
    assert client.pull("maker/tiny").status == "success", "it is there"
    with pytest.raises(ollama.ResponseError, match=r"`weft serve maker/tiny` serves it"):
        client.create(model="x", from_="maker/tiny")
    client.delete("maker/tiny")
    assert not (state / "models" / "maker--tiny").exists()
    for name, words in (("maker/other", "the hub has no such model"), ("../x", "is not a valid model name")):
        with pytest.raises(ollama.ResponseError, match=words):
            client.pull(name)
        with pytest.raises(ollama.ResponseError, match=words):
            list(client.pull(name, stream=True))


def test_a_client_that_goes_away_ends_its_pull_and_the_next_one_goes_on(
    server: RunningServer, hub: Hub, state: Path, client: ollama.Client
) -> None:
    part = state / "models" / "maker--tiny.part"
    hub.cuts["model.safetensors"] = [500_000]
    hub.held["model.safetensors"] = threading.Event()  # a hub that goes silent
    hub.ranges.clear()
    with httpx.stream("POST", f"{server.url}/api/pull", json={"model": "maker/tiny"}, timeout=60) as answer:
        lines = answer.iter_lines()  # to drop it would be to go away
        assert json.loads(next(lines)) == {"status": "pulling manifest"}
        assert eventually(lambda: ("model.safetensors", 0) in hub.ranges)
        with pytest.raises(ollama.ResponseError, match="is being pulled by process"):
            client.pull("maker/tiny")
    hub.held.pop("model.safetensors").set()
    assert eventually(lambda: holders(part) == [])
    assert part.exists(), "it was not finished"
    assert client.pull("maker/tiny").status == "success"
    assert not part.exists()
    client.delete("maker/tiny")


def test_names_of_the_default_file_are_listed_and_removed_by_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("WEFT_MODEL_DIR", str(tmp_path / "models"))
    store = PresetStore(tmp_path / "state" / "weft" / "names.json", count_max=9, bytes_max=9999)
    store.put(Preset(name="mario", model="scripted", created_s=1.0))
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert {
        "name": "mario",
        "state": "created",
        "bytes": 0,
        "path": str(store.path),
        "note": "a name for scripted",
    } in rows
    assert main(["rm", "mario"]) == 0
    assert "it was a created name" in capsys.readouterr().out
    assert main(["rm", "mario"]) == 2
    assert store.names() == {}


def test_the_store_is_bounded_and_says_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    store = PresetStore(tmp_path / "names.json", count_max=TEMPLATES_MAX + 1, bytes_max=4000)

    def put(name: str, **more: Any) -> None:
        store.put(Preset(name=name, model="m", created_s=1.0, **more))

    for number in range(TEMPLATES_MAX):
        put(f"n{number}", template=f"t{number}")
    with pytest.raises(RequestError, match="8 different templates, which is the limit"):
        put("one-more", template="another")
    put("shares", template="t0")
    with pytest.raises(RequestError, match=r"keeps 9 created names \(limits.max_created_names\)"):
        put("one-more")
    with pytest.raises(RequestError, match=r"the limit is 4000 \(limits.name_store_size\)"):
        put("n0", messages=[ChatMessage(role="user", content="a" * 4000)])
    assert len(store.names()) == 9, "a refused name leaves the others as they were"
    put("n0")  # another meaning, and it is the last one now
    assert list(store.names())[-1] == "n0"
    (tmp_path / "names.json").write_text('[{"name"')
    with pytest.raises(PresetStoreError, match=r"names\.json cannot be read"):
        store.names()
    with pytest.raises(ConfigError, match=r"\(server.name_store\)"):
        store.open_now()
    for wrong, words in (
        ('"parameters":{"temperature":"hot"}', "the parameters of n: Expected `float"),
        ('"parameters":{"stop":[1]}', "the parameters of n: Expected `str"),
    ):
        (tmp_path / "names.json").write_text(f'[{{"name":"n","model":"m","created_s":1,{wrong}}}]')
        with pytest.raises(PresetStoreError, match=rf"names\.json cannot be read: {re.escape(words)}"):
            store.names()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".writing"] == []


def test_the_longest_name_is_taken_and_no_longer_one() -> None:
    assert check_preset_name("a" * 200, param="model") == "a" * 200
    with pytest.raises(RequestError, match="at most 200 characters"):
        check_preset_name("a" * 201, param="model")
