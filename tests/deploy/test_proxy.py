"""The proxy blocks of docs/operating.md, through a real nginx where there is one: the page, a stream, a Unix socket,
and both ways to forget the name."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
NAME = "llm.example.com"
TURN = {"model": "default", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "sing"}]}


def block(first_line: str) -> str:
    [found] = re.findall(rf"^```\n({re.escape(first_line)}.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


FROM_PAGE = {"Host": NAME, "Origin": f"http://{NAME}", "Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with running_server("build", engine={"model": str(model)}, server={"allowed_host": [NAME]}) as running:
        yield running


def through_nginx(directory: Path, location: str) -> Iterator[str]:
    """Yield the URL of an nginx with ``location``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        front = free.getsockname()[1]
    (directory / "nginx.conf").write_text(
        f"daemon off; user root; pid {directory}/pid; error_log {directory}/log; events {{}}\n"
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
    location = location.replace("http://127.0.0.1:8000", server.url)
    for url in through_nginx(tmp_path, location):
        check_page_and_stream(url)
    for url in through_nginx(tmp_path, location.replace("proxy_set_header Host $host;", "")):
        refused = httpx.post(f"{url}/v1/chat/completions", json=TURN, headers=FROM_PAGE)
        assert refused.status_code == 403, "the control: without the name the page's requests are another site's"


def check_page_and_stream(url: str) -> None:
    assert httpx.get(url, headers=FROM_PAGE).status_code == 200
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=TURN, headers=FROM_PAGE) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "data: [DONE]" in list(stream.iter_lines())


def test_nginx_reaches_a_unix_socket_and_its_clients_keep_their_addresses(tmp_path: Path, model: Path) -> None:
    if NGINX is None:
        assert "CI" not in os.environ, "CI installs nginx"
        return
    own = f"http://unix:{tmp_path / 'weft.sock'}:"
    assert "proxy_pass http://unix:/run/weft/weft.sock:;" in PAGE.read_text()
    location = block("location / {").replace("http://127.0.0.1:8000", own)
    settings = {"port": None, "uds": str(tmp_path / "weft.sock"), "allowed_host": [NAME]}
    with running_server("build", engine={"model": str(model)}, server=settings):
        for url in through_nginx(tmp_path, location):
            check_page_and_stream(url)
        elsewhere = location.replace("$remote_addr", "203.0.113.7")
        for url in through_nginx(tmp_path, elsewhere):
            answer = httpx.post(f"{url}/reset_prefix_cache", headers=FROM_PAGE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_only")
        for url in through_nginx(tmp_path, location.replace("$host", "$http_host")):
            check_chat_in_a_browser(url, tmp_path)


def check_chat_in_a_browser(url: str, directory: Path) -> None:
    policy = httpx.get(url).headers["content-security-policy"]
    assert "default-src 'none'" in policy, "the page's strict policy comes through"
    if CHROMIUM is None:
        warnings.warn("no Chromium: the page was not tried behind nginx", stacklevel=1)
        return
    browser = Browser(CHROMIUM, directory / "profile")
    try:
        browser.open(url)
        browser.wait_for("document.getElementById('turns')?.hasAttribute('aria-busy')")
        browser.run("addEventListener('securitypolicyviolation', (event) => { window.refused = event.blockedURI; })")
        browser.run("document.getElementById('ask').focus()")
        browser.type("say:**bold** words")
        browser.press("Enter", 13)
        browser.wait_for("document.querySelector('#talk .answer strong')?.textContent === 'bold'")
        assert browser.run("window.refused") is None
    finally:
        browser.close()


def test_a_name_that_the_server_does_not_know_is_refused(server: RunningServer) -> None:
    refused = server.post("/v1/chat/completions", TURN, headers={"Host": "other.example.com"})
    assert refused.status_code == 421
    assert "--allowed-host" in refused.text


def test_the_block_for_caddy_forwards_to_the_server_and_buffers_no_stream() -> None:
    caddy = block("llm.example.com {")
    assert "reverse_proxy 127.0.0.1:8000" in caddy
    assert "flush_interval -1" in caddy
