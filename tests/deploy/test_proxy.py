"""The proxy blocks of docs/operating.md, through a real nginx and a real Caddy where they are: the page, a stream, a
client that leaves, a Unix socket, and both ways to forget the name."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile.test_browser import CHROMIUM
from tests.server.browser import Browser
from tests.server.running import RunningServer, eventually, running_server
from tests.server.scripted_engine import write_model_directory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CADDY = shutil.which("caddy")
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
        check_a_client_that_leaves(server, httpx.Client(base_url=url, headers=FROM_PAGE))
    for url in through_nginx(tmp_path, location.replace("proxy_set_header Host $host;", "")):
        refused = httpx.post(f"{url}/v1/chat/completions", json=TURN, headers=FROM_PAGE)
        assert refused.status_code == 403, "the control: without the name the page's requests are another site's"


def check_page_and_stream(url: str) -> None:
    assert httpx.get(url, headers=FROM_PAGE).status_code == 200
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=TURN, headers=FROM_PAGE) as stream:
        assert stream.status_code == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "data: [DONE]" in list(stream.iter_lines())


def check_a_client_that_leaves(server: RunningServer, client: httpx.Client) -> None:
    turn = {**TURN, "max_tokens": 2000}
    with server.ends_early(2000), client.stream("POST", "/v1/chat/completions", json=turn) as stream:
        assert next(stream.iter_lines()).startswith("data: ")


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
            check_policy(httpx.get(url))
            check_chat_in_a_browser(url, tmp_path)


def check_chat_in_a_browser(url: str, directory: Path, flags: Sequence[str] = ()) -> None:
    if CHROMIUM is None:
        warnings.warn("no Chromium: the page was not tried behind a proxy", stacklevel=1)
        return
    browser = Browser(CHROMIUM, directory / "profile", flags=flags)
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


def check_policy(page: httpx.Response) -> None:
    assert "default-src 'none'" in page.headers["content-security-policy"], "the page's strict policy comes through"


def test_caddy_as_documented_ends_tls_and_carries_the_page_and_streams(tmp_path: Path, server: RunningServer) -> None:
    """Its own authority signs, as no other one would for a name in a test."""
    caddyfile = block("llm.example.com {")
    assert "reverse_proxy 127.0.0.1:8000" in caddyfile
    if CADDY is None:
        assert "CI" not in os.environ, "CI installs caddy"
        return
    with socket.create_server(("127.0.0.1", 0)) as front, socket.create_server(("127.0.0.1", 0)) as plain:
        port, other = front.getsockname()[1], plain.getsockname()[1]
    (tmp_path / "Caddyfile").write_text(
        f"{{\nadmin off\nlocal_certs\nskip_install_trust\nhttps_port {port}\nhttp_port {other}\n}}\n"
        + caddyfile.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    )
    own = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [CADDY, "run", "--config", "Caddyfile", "--adapter", "caddyfile"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=tmp_path, env=own, stderr=log) as process:
        try:
            root = tmp_path / "caddy" / "pki" / "authorities" / "local" / "root.crt"
            assert eventually(lambda: root.exists() and answers(port)), (tmp_path / "log").read_text()
            trust = ssl.create_default_context(cafile=str(root))
            with AtName(port, trust) as client:
                assert eventually(lambda: has_certificate(client)), (tmp_path / "log").read_text()
                check_policy(client.get("/"))
                with client.stream("POST", "/v1/chat/completions", json=TURN) as stream:
                    assert stream.headers["content-type"].startswith("text/event-stream")
                    assert "data: [DONE]" in list(stream.iter_lines())
                check_a_client_that_leaves(server, client)
                refused = client.post("/reset_prefix_cache")
                assert refused.json()["error"]["code"] == "operator_only", "its name for the server gives it away"
            mapped = f"--host-resolver-rules=MAP {NAME} 127.0.0.1", "--ignore-certificate-errors"
            check_chat_in_a_browser(f"https://{NAME}:{port}", tmp_path, mapped)
        finally:
            process.terminate()


class AtName(httpx.Client):
    """A client of https://NAME whose connections go to ``port`` of this machine, as if a resolver had said so."""

    def __init__(self, port: int, trust: ssl.SSLContext) -> None:
        super().__init__(
            verify=trust, base_url=f"https://127.0.0.1:{port}", headers={**FROM_PAGE, "Origin": f"https://{NAME}"}
        )

    def send(self, request: httpx.Request, **more: Any) -> httpx.Response:
        request.extensions["sni_hostname"] = NAME
        return super().send(request, **more)


def has_certificate(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get("/health").status_code == 200
    return False
