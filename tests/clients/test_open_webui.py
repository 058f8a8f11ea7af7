"""What Open WebUI sends is answered with every field that it reads.

    open_webui.json    requests in the order of a session: verify, list, chat, tasks, embed, create, delete
                       "source": the function that sends it; "reads", "lines", "any", "last": fields it reads
    replay             each request as it stands, to a real server; then each field, by place and type

The requests are not recorded from a wire. They are reconstructed from the source of Open WebUI 0.12.4
(``routers/ollama.py``, ``routers/openai.py``, ``routers/tasks.py``, ``utils/payload.py``,
``utils/response.py``, ``retrieval/utils.py``), of which this folder has no line. Prompts of its tasks are
shortened. ``MODEL`` and ``CALL`` stand for the model's name and for a prompt that makes the scripted engine
call a tool. Its frontend and its database are not run; another version may send something else.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from tests.server.test_messages import CALL
from tests.server.test_tools import TEMPLATES, stop_at_end

SESSION = json.loads(Path(__file__).with_name("open_webui.json").read_text("utf-8"))
HEADERS = {
    "Authorization": "Bearer a-key",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Role": "admin",
}
KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "object": lambda value: isinstance(value, dict),
    "version": lambda value: bool(re.fullmatch(r"\d+(\.\d+)+", value)),
    "time": lambda value: datetime.datetime.fromisoformat(value).tzinfo is not None,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = stop_at_end((TEMPLATES / "hermes_think.jinja").read_text())
    template = template.replace("{{- '<think>\\n\\n</think>\\n\\n' }}", "")  # the script would repeat it
    directory = write_model_directory(tmp_path_factory.mktemp("hermes"), template=template)
    with running_server(
        "build",
        engine={"model": str(directory)},
        server={"api_key": ["a-key"], "name_store": str(directory / "names.json")},
    ) as running:
        yield running


def values_at(value: Any, place: str) -> list[Any]:
    """``models[].name``: of each element. None of them where the place is not there."""
    values = [value]
    for step in re.findall(r"[^.\[\]]+|\[\]", place):
        if step == "[]":
            values = [one for listed in values if isinstance(listed, list) for one in listed]
        else:
            values = [one[step] for one in values if isinstance(one, dict) and one.get(step) is not None]
    return values


def missing(value: Any, reads: list[str]) -> list[str]:
    """Fields that are not there, or of another type."""
    faults = []
    for read in reads:
        place, _, kind = read.rpartition(":")
        values = values_at(value, place)
        if not values or not all(map(KINDS[kind], values)):
            faults.append(f"{read} in {str(value)[:300]}")
    return faults


def objects_of(answer: httpx.Response, request: dict[str, Any]) -> list[Any]:
    """The answer, or each line or event of a stream."""
    if "events" in request:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]
    if "lines" in request:
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in answer.text.splitlines()]
    # aiohttp reads JSON out of nothing else.
    assert answer.headers["content-type"].startswith("application/json")
    return [answer.json()]


def said_in(objects: list[Any]) -> str:
    places = (
        "message.content",
        "response",
        "choices[].delta.content",
        "choices[].message.content",
        "choices[].text",
        "content[].text",
        "output[].content[].text",
    )
    return "".join(str(text) for one in objects for place in places for text in values_at(one, place))


def faults_of(answer: httpx.Response, request: dict[str, Any]) -> list[str]:
    if answer.status_code != request.get("status", 200):
        return [f"{answer.status_code}: {answer.text[:300]}"]
    if "words" in request and request["words"] not in answer.text:
        return [f"no {request['words']!r} in {answer.text[:300]}"]
    if not {"reads", "lines", "events"} & set(request):
        return []
    objects = objects_of(answer, request)
    faults = missing(objects[0], request.get("reads", []))
    faults += [fault for one in objects for fault in missing(one, request.get("lines", []))]
    faults += [fault for one in objects for fault in missing(one, request.get("events", []))]
    faults += [f"{read} in no part" for read in request.get("any", []) if all(missing(one, [read]) for one in objects)]
    faults += missing(objects[-1], request.get("last", []))
    if "says" in request and said_in(objects) != request["says"]:
        faults.append(f"it says {said_in(objects)!r}")
    return faults


def sent(server: RunningServer, request: dict[str, Any]) -> httpx.Response:
    body = json.dumps(request.get("body")).replace('"MODEL"', '"scripted"')
    body = body.replace('"CALL"', json.dumps(f"say:{CALL}"))
    content = {"content": body, "headers": {**HEADERS, "Content-Type": "application/json"}}
    with httpx.Client(timeout=60) as client:
        return client.request(
            request["method"], server.url + request["path"], **(content if "body" in request else {"headers": HEADERS})
        )


def test_a_session_of_open_webui_is_answered_with_all_that_it_reads(server: RunningServer) -> None:
    assert SESSION["version"] == "0.12.4"
    faults = {
        request["what"]: found
        for request in SESSION["requests"]
        if (found := faults_of(sent(server, request), request))
    }
    assert faults == {}


def test_a_replay_sees_a_field_that_is_gone(server: RunningServer) -> None:
    """The control: every field of every answer, read under another name."""
    for request in SESSION["requests"][:4]:
        for where in ("reads", "lines", "last"):
            for read in request.get(where, []):
                wrong = {**request, where: [f"other_{read}"]}
                assert faults_of(sent(server, request), wrong), read
    chat = SESSION["requests"][3]
    assert faults_of(sent(server, chat), {**chat, "says": "something else"})
