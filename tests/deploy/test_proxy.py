"""The proxy blocks of docs/operating.md, through a real nginx where there is one: the page, a stream, and both ways to
forget the name."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
NAME = "llm.example.com"
TURN = {"model": "default", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "sing"}]}


def block(first_line: str) -> str:
    [found] = re.findall(rf"^```\n({re.escape(first_line)}.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_model_directory(tmp_path_factory.mktemp("model"))
    with running_server("build", engine={"model": str(model)}, server={"allowed_host": [NAME]}) as running:
        yield running


def through_nginx(directory: Path, location: str, port: int) -> Iterator[str]:
    """Yield the URL of an nginx with ``location`` in front of ``port``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        front = free.getsockname()[1]
    location = location.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    (directory / "nginx.conf").write_text(
        f"daemon off; pid {directory}/pid; error_log {directory}/log; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;\n"
        f"fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;\n"
        f"server {{ listen 127.0.0.1:{front}; {location} }} }}\n"
    )
    assert NGINX is not None
    with subprocess.Popen([NGINX, "-p", str(directory), "-c", str(directory / "nginx.conf")]) as process:
        try:
            assert eventually(lambda: answers(front)), (directory / "log").read_text()
            yield f"http://127.0.0.1:{front}"
        finally:
            process.terminate()


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_nginx_as_documented_carries_the_page_and_streams(tmp_path: Path, server: RunningServer) -> None:
    location = block("location / {")
    assert "proxy_set_header Host $host;" in location
    assert NGINX or "CI" not in os.environ, "CI installs nginx"
    if NGINX is None:
        return
    port = int(server.url.rpartition(":")[2])
    from_page = {"Host": NAME, "Origin": f"http://{NAME}", "Sec-Fetch-Site": "same-origin"}
    for url in through_nginx(tmp_path, location, port):
        assert httpx.get(url, headers=from_page).status_code == 200
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=TURN, headers=from_page) as stream:
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert "data: [DONE]" in list(stream.iter_lines())
    for url in through_nginx(tmp_path, location.replace("proxy_set_header Host $host;", ""), port):
        refused = httpx.post(f"{url}/v1/chat/completions", json=TURN, headers=from_page)
        assert refused.status_code == 403, "the control: without the name the page's requests are another site's"


def test_a_name_that_the_server_does_not_know_is_refused(server: RunningServer) -> None:
    refused = server.post("/v1/chat/completions", TURN, headers={"Host": "other.example.com"})
    assert refused.status_code == 421
    assert "--allowed-host" in refused.text


def test_the_block_for_caddy_forwards_to_the_server_and_buffers_no_stream() -> None:
    caddy = block("llm.example.com {")
    assert "reverse_proxy 127.0.0.1:8000" in caddy
    assert "flush_interval -1" in caddy
