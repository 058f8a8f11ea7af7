"""Clients that leave while their conversations wait to be rendered: the work does not begin."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import CHAT_TEMPLATE, write_model_directory

LOOP = "{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}"
SLOW = "{% if messages[-1].content == 'slow' %}" + LOOP + "{% endif %}"
GONE = 16


def worker_seconds(server: RunningServer) -> float:
    """Seconds of the CPU that workers of the server have used."""
    ticks = 0
    for child in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in child.read_text().split():
            if b"worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / 100


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize", "/api/chat"])
def test_a_conversation_whose_client_has_left_is_not_rendered(path: str, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "slow"}]
    bodies = {
        "/v1/responses": {"input": messages, "max_output_tokens": 1},
        "/api/chat": {"model": "default", "messages": messages, "stream": False, "options": {"num_predict": 1}},
        "/tokenize": {"messages": messages},
    }
    raw = json.dumps(bodies.get(path, {"messages": messages, "max_tokens": 1})).encode()
    fields = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json")
    head = "\r\n".join([*fields, f"content-length: {len(raw)}", "", ""])
    before_s = worker_seconds(server)
    assert server.post(path, json.loads(raw)).status_code == 200
    one_s = worker_seconds(server) - before_s
    assert one_s > 0
    address = urlsplit(server.url)
    clients = [socket.create_connection((address.hostname, address.port)) for _ in range(GONE)]
    for client in clients:
        client.sendall(head.encode() + raw)
    time.sleep(0.2)
    for client in clients:
        client.close()
    before_s = worker_seconds(server)
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": "say:x"}]}).status_code == 200
    assert eventually(lambda: server.running() == 0)
    assert worker_seconds(server) - before_s < GONE / 2 * one_s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> object:
    directory = write_model_directory(tmp_path_factory.mktemp("slow"), template=SLOW + CHAT_TEMPLATE)
    with running_server("build", engine={"model": str(directory)}) as running:
        yield running
