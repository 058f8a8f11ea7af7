"""A real browser opens a page of another site, whose script sends requests to the server.

Where no Chromium is installed, the test checks what the page would send with bare requests instead, and the
run says at its end that the browser was left out."""

from __future__ import annotations

import json
import queue
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.hostile.test_origins import send
from tests.server.running import RunningServer, running_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGE = (Path(__file__).parent / "browser.html").read_bytes()
BROWSER_LIMIT_S = 60.0


class _OtherSite(BaseHTTPRequestHandler):
    def __init__(self, results: queue.Queue[dict[str, str]], *arguments: object) -> None:
        self._results = results
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def do_POST(self) -> None:
        self._results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


class OtherSite:
    """A site on a port of its own, and what the script of its page reported."""

    def __init__(self) -> None:
        self.results: queue.Queue[dict[str, str]] = queue.Queue()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_OtherSite, self.results))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.port = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def other_site() -> Iterator[OtherSite]:
    site = OtherSite()
    yield site
    site.close()


def _report_of(page: str, site: OtherSite, profile: Path) -> dict[str, str]:
    assert CHROMIUM is not None
    browser = subprocess.Popen(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--host-resolver-rules=MAP *.example 127.0.0.1",
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
            page,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return site.results.get(timeout=BROWSER_LIMIT_S)
    finally:
        browser.kill()
        browser.wait()


def _generated(server: RunningServer) -> float:
    match = re.search(r"weft:prompt_tokens_total{\S* (\S+)", server.get("/metrics").text)
    assert match is not None
    return float(match[1])


@pytest.mark.parametrize(
    ("page_host", "server_host"),
    [
        ("127.0.0.1", "127.0.0.1"),  # another port of the same address
        ("evil.example", "127.0.0.1"),  # another site
        ("127.0.0.1", "evil.example"),  # a name that was rebound to this machine
    ],
)
def test_a_page_of_another_site_reaches_nothing(
    server: RunningServer, other_site: OtherSite, tmp_path: Path, page_host: str, server_host: str
) -> None:
    before = _generated(server)
    target = server.url.replace("127.0.0.1", server_host)
    origin = f"http://{page_host}:{other_site.port}"
    if CHROMIUM is None:
        status = send(
            server,
            "POST",
            "/v1/completions",
            {"Host": target.removeprefix("http://"), "Origin": origin},
            {"prompt": "a"},
        ).status
        assert status == (421 if server_host == "evil.example" else 403)
    else:
        report = _report_of(f"{origin}/?server={target}", other_site, tmp_path)
        assert report == {"simple post": "blocked", "unread post": "opaque", "json post": "blocked", "read": "blocked"}
    assert _generated(server) == before


def test_a_page_of_an_allowed_origin_is_served(model_directory: Path, other_site: OtherSite, tmp_path: Path) -> None:
    """The control: the same script, allowed."""
    origin = f"http://127.0.0.1:{other_site.port}"
    with running_server("build", engine={"model": str(model_directory)}, server={"allowed_origin": [origin]}) as own:
        if CHROMIUM is None:
            answer = send(
                own,
                "POST",
                "/v1/completions",
                {"Host": "localhost", "Origin": origin, "Content-Type": "application/json"},
                {"prompt": "a", "max_tokens": 1},
            )
            assert answer.headers["access-control-allow-origin"] == origin
        else:
            report = _report_of(f"{origin}/?server={own.url}", other_site, tmp_path)
            assert report == {"simple post": "415", "unread post": "opaque", "json post": "200", "read": "200"}
