"""The pages and tables by which coding agents are run (``agents.py``), without an agent."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.clients import tape
from tests.clients.agent_table import AGENTS, settings
from tests.clients.agents import unknown_endpoints, unknown_fields
from tests.clients.recorder import Recorder
from tests.server.agent_bodies import BODIES

URL = "http://127.0.0.1:4321"


@pytest.mark.parametrize("name", AGENTS)
def test_the_page_points_each_agent_at_the_server(name: str) -> None:
    found = settings(AGENTS[name].title, URL, 12_345)
    told = [*found.files.values(), *found.variables.values(), *(word for line in found.lines for word in line)]
    assert any(URL in text for text in told)
    assert not any("8000" in text for text in told)
    assert found.lines


def test_a_section_that_the_page_lacks_is_an_error() -> None:
    with pytest.raises(AssertionError, match="has no section Nobody"):
        settings("Nobody")


def _add_to(body: dict[str, Any], *places: str | int, **more: Any) -> None:
    for place in places:
        body = body[place]  # type: ignore[index]
    body.update(more)


NEW: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "a field": ("claude", lambda body: _add_to(body, speed="fast"), "speed"),
    "a field of a block": ("claude", lambda body: _add_to(body, "thinking", mood="calm"), "thinking[adaptive].mood"),
    "a block": (
        "claude",
        lambda body: body["messages"][0]["content"].append({"type": "sketch", "lines": []}),
        "messages.content[sketch].lines",
    ),
    "a type of tool": ("codex", lambda body: body["tools"].append({"type": "browser"}), "tools[browser]"),
    "a field of a tool": ("codex", lambda body: _add_to(body, "tools", 0, lazy=True), "tools[function].lazy"),
    "an item": ("codex", lambda body: body["input"].append({"type": "note", "text": "n"}), "input[note].text"),
    "a field of a message": ("qwen", lambda body: _add_to(body, "messages", 0, mood="calm"), "messages.mood"),
    "a field of a past call": (
        "qwen",
        lambda body: _add_to(body, "messages", 4, "tool_calls", 0, extra_content={}),
        "messages.tool_calls[function].extra_content",
    ),
}


@pytest.mark.parametrize("case", NEW)
def test_what_a_newer_release_sends_is_named(case: str) -> None:
    name, change, expected = NEW[case]
    path, known = BODIES[name]
    body = copy.deepcopy(known)
    change(body)
    assert f"{path} {expected}" in unknown_fields([{"path": path, "body": body}])


def test_an_endpoint_that_the_server_lacks_is_named() -> None:
    asked = [("POST", "/v1/responses/compact", 404), ("GET", "/v1/models", 200), ("POST", "/v1/messages", 400)]
    seen = [{"method": method, "path": path, "status": status} for method, path, status in asked]
    assert unknown_endpoints(seen) == {"POST /v1/responses/compact"}


@pytest.mark.parametrize("name", BODIES)
def test_what_the_bodies_have_and_what_tools_define_is_no_news(name: str) -> None:
    path, known = BODIES[name]
    body = copy.deepcopy(known)
    for tool in body.get("tools", ()):
        inner = tool.get("function", tool)
        for key in ("parameters", "input_schema"):
            if key in inner:
                inner[key] = {"type": "object", "properties": {"anything": {"type": "string"}}}
    assert not unknown_fields([{"path": path, "body": body}])


def test_a_client_that_leaves_before_the_answer_begins_leaves_the_server_too() -> None:
    """An agent that asks for whole answers is cut so."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        recorder = Recorder(f"http://127.0.0.1:{server.getsockname()[1]}")
        with socket.create_connection(urlsplit(recorder.url).netloc.split(":")) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
            connection, _ = server.accept()
            connection.settimeout(10)
            while not connection.recv(4096).endswith(b"{}"):
                pass
        with connection:
            assert connection.recv(1) == b"", "the server would go on"
        recorder.close()


def test_no_piece_of_a_tape_is_a_control_token_of_its_template() -> None:
    """A text of an agent that spells one would be hidden from the template, which looks for words in it."""
    said = "".join(f"Part {at}.{tape.call('read_file', {'file_path': '/a'})}" for at in range(4))
    pieces = tape._pieces(said, set(), tape._TEMPLATE)
    assert "".join(pieces) == said
    signs = [piece for piece in pieces if not piece[0].isalnum() and piece in tape._TEMPLATE]
    assert set(signs) <= set(tape._MARKS)
