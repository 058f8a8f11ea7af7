"""Sessions over HTTP with tiny hybrids of three kinds: saved, killed, restored by another process, forked, deleted.

Bits: the logprobs of a request that continues a session are those of the same tokens computed cold, under another
``cache_salt``. Counts: a request computes its own tokens and no others.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.vision_checkpoints import vision_checkpoint
from tests.oracle.test_replaced_weights import change_one_element
from tests.server.running import RunningServer, eventually, running_server
from tests.server.test_pictures import TEMPLATE, URL

FAMILIES = ("qwen3_5", "granite", "lfm2")
"""Delta nets, Mamba-2 and short convolutions, each with attention."""
PROMPT = [3 + 7 * number % 251 for number in range(203)]
MORE = [11 + 5 * number % 199 for number in range(9)]


@contextlib.contextmanager
def serving(
    folder: Path, family: str = "qwen3_5", *, model: Path | None = None, server: Any = None, **engine: Any
) -> Iterator[RunningServer]:
    """A server whose states and sessions are in ``folder``."""
    settings = {
        "model": str(model or checkpoint(family)),
        "memory": "24MB",
        "threads": 1,
        "max_model_len": 1024,
        "dtype": "float32",
        "store": str(folder / "store"),
        "store_size": "1GB",
        "store_reserve": "1MB",
    }
    stored = {"response_store": str(folder / "objects.sqlite"), **(server or {})}
    with running_server("", engine=settings | engine, server=stored) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("sessions")) as running:
        yield running


def save(server: RunningServer, name: str, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/sessions", {"name": name, "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def complete(server: RunningServer, prompt: list[int], **fields: Any) -> tuple[list[int], list[float], int]:
    """(tokens, logprobs, computed prompt tokens)."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", {**body, "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    [choice], usage = whole["choices"], whole["usage"]
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], computed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_outlives_kill_9_and_computes_new_tokens_only(family: str, tmp_path: Path) -> None:
    with serving(tmp_path, family) as first:
        saved = save(first, "trip")
        assert (saved["tokens"], saved["computed_tokens"], saved["in_memory"]) == (len(PROMPT),) * 3
        assert saved["stored"] is True
        first.process.kill()
        first.process.wait()
    with serving(tmp_path, family) as second:
        restored = second.post("/v1/sessions/trip/restore").json()
        assert (restored["computed_tokens"], restored["in_memory"]) == (0, len(PROMPT))
        tokens, logprobs, computed = complete(second, MORE, session="trip")
        assert computed == len(MORE)
        cold = complete(second, [*PROMPT, *MORE], cache_salt="cold")
        assert cold == (tokens, logprobs, len(PROMPT) + len(MORE))


def test_a_request_restores_a_session_by_itself(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        save(first, "trip")
        first.process.kill()
        first.process.wait()
    with serving(tmp_path) as second:
        assert complete(second, MORE, session="trip")[2] == len(MORE)
        assert second.metric("session_hits_total") == 1


def test_a_fork_computes_nothing_and_takes_no_page(server: RunningServer) -> None:
    save(server, "root")
    before = server.get("/v1/cache").json()
    for number in range(20):
        forked = server.post("/v1/sessions/root/fork", {"name": f"fork-{number}"}).json()
        assert (forked["computed_tokens"], forked["parent"], forked["tokens"]) == (0, "root", len(PROMPT))
    after = server.get("/v1/cache").json()
    assert (after["pages"], after["states"]) == (before["pages"], before["states"])
    first = complete(server, MORE, session="fork-0")
    for number in range(1, 20):
        assert complete(server, [*MORE[:4], 200 + number], session=f"fork-{number}")[2] == 5
    assert complete(server, MORE, session="root")[:2] == first[:2]


def test_a_conversation_goes_on_by_its_new_messages(server: RunningServer) -> None:
    client = server.client()
    said = [{"role": "system", "content": "You are brief. " * 20}, {"role": "user", "content": "say:one"}]
    answer = client.chat.completions.create(model="default", messages=said, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    saved = server.post("/v1/sessions", {"name": "talk", "messages": said}).json()
    more = [{"role": "user", "content": "say:two"}]
    body = {"messages": more, "max_tokens": 6, "temperature": 0, "logprobs": True}
    short = server.post("/v1/chat/completions", {**body, "session": "talk"}).json()
    usage = short["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == saved["tokens"]
    whole = server.post("/v1/chat/completions", {**body, "messages": said + more, "cache_salt": "cold"}).json()
    assert short["choices"] == whole["choices"]
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    shown = server.get("/v1/sessions/talk").json()
    assert [one["role"] for one in shown["messages"]] == ["system", "user", "assistant"]
    by_client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    again = by_client.chat.completions.create(
        model="default",
        messages=more,  # type: ignore[arg-type]
        max_tokens=6,
        temperature=0,
        extra_body={"session": "talk"},
    )
    assert again.choices[0].message.content == short["choices"][0]["message"]["content"]


def test_a_stored_response_becomes_a_session_of_its_own_tokens(server: RunningServer) -> None:
    first = server.client().responses.create(model="default", input="say:hello " * 10, max_output_tokens=12)
    saved = server.post("/v1/sessions", {"name": "kept", "response_id": first.id})
    assert saved.status_code == 200, saved.text
    assert saved.json()["tokens"] > first.usage.input_tokens  # type: ignore[union-attr]
    body = {"session": "kept", "messages": [{"role": "user", "content": "say:more"}], "max_tokens": 4}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= saved.json()["tokens"]


def test_a_saved_name_is_replaced_listed_and_deleted(server: RunningServer) -> None:
    save(server, "changing")
    assert save(server, "changing", PROMPT[:50])["tokens"] == 50
    listed = {one["name"]: one["tokens"] for one in server.get("/v1/sessions?limit=100").json()["data"]}
    assert listed["changing"] == 50
    gone = server.client().delete("/sessions/changing", cast_to=httpx.Response)
    assert gone.json()["deleted"] is True
    assert server.get("/v1/sessions/changing").status_code == 404
    assert server.post("/v1/completions", {"prompt": "a", "session": "changing"}).status_code == 404


def test_the_slots_of_llama_server(server: RunningServer) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "id_slot": 1, "cache_prompt": True}
    server.post("/v1/completions", asked)
    saved = server.post("/slots/1?action=save", {"filename": "slot1.bin"})
    assert saved.status_code == 200, saved.text
    assert saved.json()["id_slot"] == 1
    assert saved.json()["n_saved"] == len(PROMPT) + 4
    assert saved.json()["n_written"] > 0
    assert saved.json()["timings"]["save_ms"] > 0
    restored = server.post("/slots/0?action=restore", {"filename": "slot1.bin"}).json()
    assert (restored["id_slot"], restored["n_restored"]) == (0, len(PROMPT) + 4)
    assert restored["n_read"] == saved.json()["n_written"]
    assert {one["id"] for one in server.get("/slots").json()} == {0, 1}
    assert server.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": len(PROMPT) + 4}
    assert {one["id"] for one in server.get("/slots").json()} == {1}


BAD = {
    "no source": ("/v1/sessions", {"name": "a"}, 400, "messages, response_id and prompt"),
    "two sources": ("/v1/sessions", {"name": "a", "prompt": "x", "messages": []}, 400, "messages and prompt"),
    "a name": ("/v1/sessions", {"name": "../a", "prompt": "x"}, 400, "letters, digits"),
    "a time": ("/v1/sessions", {"name": "a", "prompt": "x", "expires_after": -1}, 400, "limits.session_days"),
    "a token": ("/v1/sessions", {"name": "a", "prompt": [1 << 30]}, 400, "this model has tokens"),
    "nothing": ("/v1/sessions", {"name": "a", "prompt": []}, 400, "empty"),
    "a response": ("/v1/sessions", {"name": "a", "response_id": "resp_none"}, 404, "resp_none"),
    "a fork of none": ("/v1/sessions/none/fork", {"name": "a"}, 404, "there is no session 'none'"),
    "chat on tokens": (
        "/v1/chat/completions",
        {"session": "tokens", "messages": [{"role": "user", "content": "x"}]},
        400,
        "/v1/completions continues it",
    ),
    "an action": ("/slots/1?action=load", {"filename": "a"}, 400, "save, restore, erase"),
    "a slot": ("/slots/99?action=save", {"filename": "a"}, 400, "at most 63"),
    "an empty slot": ("/slots/7?action=save", {"filename": "a"}, 400, "slot 7 has no tokens"),
    "no file": ("/slots/1?action=restore", {}, 400, "filename is missing"),
    "a request's slot": ("/v1/completions", {"prompt": "x", "id_slot": 64}, 400, "id_slot"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_nothing_is_lost(server: RunningServer, case: str) -> None:
    path, body, status, words = BAD[case]
    save(server, "tokens")
    before = server.get("/v1/sessions?limit=100").json()["data"]
    answer = server.post(path, body)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, words in message, "\n" in message) == (status, True, False), message
    assert server.get("/v1/sessions?limit=100").json()["data"] == before


def test_a_session_ends_with_its_time(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        save(running, "short", expires_after=0.5)
        assert eventually(lambda: running.get("/v1/sessions/short").status_code == 404)
        assert running.get("/v1/sessions").json()["data"] == []


def test_keys_have_sessions_of_their_own_and_as_many_as_the_limit(tmp_path: Path) -> None:
    settings = {"api_key": ["first", "second"], "tenant_by_key": True, "max_sessions": 2}
    with serving(tmp_path, server=settings) as running:
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))

        def put(name: str, key: dict[str, str]) -> httpx.Response:
            return running.post("/v1/sessions", {"name": name, "prompt": PROMPT}, headers=key)

        assert put("mine", first).json()["computed_tokens"] == len(PROMPT)
        assert running.get("/v1/sessions/mine", headers=second).status_code == 404
        assert running.get("/v1/sessions", headers=second).json()["data"] == []
        assert put("mine", second).json()["computed_tokens"] == len(PROMPT)  # no page is shared either
        assert put("more", first).status_code == 200
        refused = put("too-many", first)
        assert refused.status_code == 429
        assert "limits.max_sessions" in refused.json()["error"]["message"]
        assert put("more", first).status_code == 200  # in its own place
        assert put("more", second).status_code == 200
        asked = {"prompt": MORE, "session": "mine", "max_tokens": 1}
        usage = running.post("/v1/completions", asked, headers=first).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)


def test_a_session_of_other_weights_is_a_conflict(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("lfm2"), model)
    with serving(tmp_path, model=model) as running:
        save(running, "old")
    change_one_element(model)
    with serving(tmp_path, model=model) as running:
        for path, body in (("/v1/sessions/old/restore", None), ("/v1/completions", {"prompt": MORE, "session": "old"})):
            answer = running.post(path, body)
            assert answer.status_code == 409, answer.text
            assert "'old' was saved with other weights" in answer.json()["error"]["message"]
        assert running.get("/v1/sessions/old").json()["tokens"] == len(PROMPT)
        assert save(running, "old")["computed_tokens"] == len(PROMPT)
        assert complete(running, MORE, session="old")[2] == len(MORE)


@pytest.mark.parametrize("encrypted", [True, False])
def test_nothing_on_disk_has_a_token_with_a_key(tmp_path: Path, encrypted: bool) -> None:
    """Killed with -9 and started again it hits, and with another key or none it answers the same from nothing."""
    for name in ("key", "other"):
        (tmp_path / name).write_text(name[0] * 40)
        (tmp_path / name).chmod(0o600)
    keys = {"session_key": str(tmp_path / "key")} if encrypted else {}
    with serving(tmp_path, server=keys, **keys) as running:
        save(running, "secret")
        said = [{"role": "user", "content": "the word is xylophone"}]
        running.post("/v1/sessions", {"name": "words", "messages": said})
        right = complete(running, MORE, session="secret")
        assert right[2] == len(MORE)
        running.process.kill()
        running.process.wait()
    objects = b"".join(file.read_bytes() for file in tmp_path.glob("objects.sqlite*"))
    records = b"".join(file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file())
    tokens = np.asarray(PROMPT[:16], np.int32).tobytes()
    found = [tokens in objects, b"xylophone" in objects, tokens in records]
    assert found == [not encrypted] * 3
    with serving(tmp_path, server=keys, **keys) as running:
        assert running.post("/v1/sessions/secret/restore").json()["computed_tokens"] == 0
        again = complete(running, MORE, session="secret")
        assert (again[:2], again[2] <= len(MORE)) == (right[:2], True)
    other = {"session_key": str(tmp_path / "other")}
    for wrong in [other, {}] if encrypted else [other]:
        with serving(tmp_path, server=wrong, **wrong) as running:
            if encrypted:
                answer = running.get("/v1/sessions/secret")
                assert answer.status_code == 409
                assert "another key" in answer.json()["error"]["message"]
            assert complete(running, PROMPT + MORE) == (*right[:2], len(PROMPT) + len(MORE))
            assert "snapshots of this model are" in running.output


def test_http_processes_know_the_weights_of_an_update(tmp_path: Path) -> None:
    first, second = (Path(shutil.copytree(checkpoint("lfm2"), tmp_path / name)) for name in ("first", "second"))
    change_one_element(second)
    with serving(tmp_path, model=first, server={"http_workers": 2}) as running:
        save(running, "old")
        assert complete(running, MORE, session="old")[2] == len(MORE)
        running.post("/update_weights", {"path": str(second)}).raise_for_status()
        for _ in range(8):  # at both processes
            answer = running.post("/v1/completions", {"prompt": MORE, "session": "old"})
            assert answer.status_code == 409, answer.text
            assert "'old' was saved with other weights" in answer.json()["error"]["message"]
        assert save(running, "old")["computed_tokens"] == len(PROMPT)
        assert complete(running, MORE, session="old")[2] == len(MORE)


SHOWN = {"type": "image_url", "image_url": {"url": URL}}
LOOKED = [
    {"role": "user", "content": [SHOWN, {"type": "text", "text": "the dog and the cat"}]},
    {"role": "assistant", "content": "a page"},
]


def test_a_conversation_with_a_picture_outlives_kill_9(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    model, keys = vision_checkpoint("lfm2_vl"), {"chat_template": str(template)}
    more = {"messages": [{"role": "user", "content": "and then"}], "max_tokens": 6, "temperature": 0, "logprobs": True}
    with serving(tmp_path, model=model, server=keys) as first:
        saved = first.post("/v1/sessions", {"name": "seen", "messages": LOOKED}).json()
        assert saved["computed_tokens"] == saved["tokens"]
        assert saved["stored"] is True
        first.process.kill()
        first.process.wait()
    with serving(tmp_path, model=model, server=keys) as second:
        restored = second.post("/v1/sessions/seen/restore").json()
        assert (restored["computed_tokens"], restored["in_memory"]) == (0, saved["tokens"])
        short = second.post("/v1/chat/completions", {**more, "session": "seen"}).json()
        assert short["usage"]["prompt_tokens_details"]["cached_tokens"] == saved["tokens"]
        whole = {**more, "messages": LOOKED + more["messages"], "cache_salt": "cold"}  # type: ignore[operator]
        cold = second.post("/v1/chat/completions", whole).json()
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert short["choices"] == cold["choices"]
        text_only = second.post("/v1/completions", {"prompt": MORE, "session": "seen"})
        assert text_only.status_code == 400
        assert "has pictures, so only a chat continues it" in text_only.json()["error"]["message"]
