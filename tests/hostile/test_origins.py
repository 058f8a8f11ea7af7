"""Pages of other sites and rebound names: what a browser would send for them is refused."""

from __future__ import annotations

import json

import pytest

from tests.hostile.raw import Answer, RawClient
from tests.server.running import RunningServer
from weft.errors import ConfigError
from weft.server.edge import Origins

SERVER = {"allowed_host": ["weft.example.org"], "allowed_origin": ["https://app.example.org"]}
BODY = {"prompt": "say:ok", "max_tokens": 4}
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/cache/flush", "/sleep", "/wake_up"]


def send(server: RunningServer, method: str, path: str, headers: dict[str, str], body: object = None) -> Answer:
    """``httpx`` adds headers of its own; this does not."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"Content-Length: {len(data)}",
    ]
    with RawClient(server.url) as client:
        client.send("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        answer = client.answer()
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "",
        "a b",
        "localhost.evil.example",
        "localhost@evil.example",
        "[::1",
    ],
)
@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/sleep"])
def test_a_rebound_name_is_refused(server: RunningServer, host: str, path: str) -> None:
    method = "POST" if path == "/sleep" else "GET"
    answer = send(server, method, path, {"Host": host, "Origin": f"http://{host}"})
    assert (answer.status, answer.error["code"]) == (421, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.0.0.1:9",
        "[::1]:8000",
        "192.168.3.4",
        "weft.example.org",
        "weft.example.org.:443",
        "a.localhost",
    ],
)
def test_a_name_of_the_server_is_served(server: RunningServer, host: str) -> None:
    assert send(server, "GET", "/health", {"Host": host}).status == 200


def test_two_hosts_are_refused(server: RunningServer) -> None:
    with RawClient(server.url) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        answer = client.answer()
    assert answer is not None
    assert answer.status == 400


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        "file://",
        "https://app.example.org.evil.example",
        "http://app.example.org",
    ],
)
@pytest.mark.parametrize("path", POSTS)
def test_a_foreign_page_may_send_nothing(server: RunningServer, origin: str, path: str) -> None:
    answer = send(
        server, "POST", path, {"Host": "127.0.0.1", "Origin": origin, "Content-Type": "application/json"}, BODY
    )
    assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_foreign_page_without_origin_is_refused(server: RunningServer, site: str) -> None:
    answer = send(server, "POST", "/v1/cache/flush", {"Host": "127.0.0.1", "Sec-Fetch-Site": site})
    assert answer.status == 403


@pytest.mark.parametrize(
    "media_type",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=a",
        "text/plain; application/json",
        "",
    ],
)
@pytest.mark.parametrize("path", POSTS)
def test_a_body_must_be_declared_as_json(server: RunningServer, media_type: str | None, path: str) -> None:
    """What a page may send without a preflight is one of these. (A flush reads no body.)"""
    headers = {} if media_type is None else {"Content-Type": media_type}
    answer = send(server, "POST", path, {"Host": "127.0.0.1", **headers}, BODY)
    if path != "/v1/cache/flush":
        assert answer.status == 415
        assert "Content-Type: application/json" in answer.error["message"]


OLLAMA = {
    "/api/chat": {"model": "scripted", "messages": [{"role": "user", "content": "say:ok"}]},
    "/api/generate": {"model": "scripted", "prompt": "say:ok"},
    "/api/show": {"model": "scripted"},
    "/api/embed": {"model": "scripted", "input": "a"},
    "/api/embeddings": {"model": "scripted", "prompt": "a"},
    "/api/create": {"model": "of-a-page", "from": "scripted"},
    "/api/copy": {"source": "scripted", "destination": "of-a-page"},
    "/api/delete": {"model": "by-hand"},
    "/api/pull": {"model": "maker/tiny"},
}
"""Their bodies may come under any type, as ``curl -d`` sends them: the origin alone keeps pages out."""
FROM_PAGES = [
    {"Origin": origin, "Content-Type": kind}
    for origin in ("http://evil.example", "null", "file://")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json")
]
FROM_PAGES += [{"Sec-Fetch-Site": site, "Content-Type": "text/plain"} for site in ("cross-site", "same-site")]


def test_no_page_reaches_ollamas_endpoints_and_a_program_does(server: RunningServer) -> None:
    """A page can send such a request without a preflight, also to 127.0.0.1, and under a rebound name."""
    program = {"Host": "127.0.0.1", "Content-Type": "application/x-www-form-urlencoded"}
    by_hand = {"model": "by-hand", "from": "scripted", "stream": False}
    assert send(server, "POST", "/api/create", program, by_hand).status == 200
    for path, body in OLLAMA.items():
        method = "DELETE" if path == "/api/delete" else "POST"
        for headers in FROM_PAGES:
            answer = send(server, method, path, {"Host": "127.0.0.1", **headers}, body)
            assert answer.status == 403, (path, headers)
            assert b"may not use this server" in answer.body
            assert "access-control-allow-origin" not in answer.headers
        for host in ("evil.example", "127.0.0.1.evil.example:80"):
            rebound = send(server, method, path, {"Host": host, "Origin": f"http://{host}"}, body)
            assert rebound.status == 421, (path, host)
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert send(server, "GET", path, {"Host": "evil.example"}).status == 421
    names = [card["id"] for card in server.get("/v1/models").json()["data"]]
    assert "by-hand" in names
    assert "of-a-page" not in names, "nothing came of it"
    assert send(server, "DELETE", "/api/delete", program, {"model": "by-hand"}).status == 200
    assert send(server, "POST", "/api/generate", program, OLLAMA["/api/generate"]).status == 200
    preflight = send(
        server,
        "OPTIONS",
        "/api/delete",
        {"Host": "127.0.0.1", "Origin": "http://evil.example", "Access-Control-Request-Method": "DELETE"},
    )
    assert preflight.status == 405


def test_an_allowed_origin_gets_cors(server: RunningServer) -> None:
    origin = {"Host": "127.0.0.1", "Origin": "https://app.example.org"}
    preflight = send(
        server,
        "OPTIONS",
        "/v1/completions",
        {
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        },
    )
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    answer = send(server, "POST", "/v1/completions", {**origin, "Content-Type": "application/json"}, BODY)
    assert answer.status == 200
    for one in (preflight, answer):
        assert one.headers["access-control-allow-origin"] == "https://app.example.org"
        assert one.headers["vary"] == "Origin"


def test_a_preflight_of_a_foreign_page_gets_no_permission(server: RunningServer) -> None:
    answer = send(
        server,
        "OPTIONS",
        "/v1/completions",
        {"Host": "127.0.0.1", "Origin": "http://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert answer.status == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_answer_says_nosniff(server: RunningServer) -> None:
    for method, path in [
        ("GET", "/"),
        ("GET", "/health"),
        ("GET", "/nowhere"),
        ("PUT", "/health"),
        ("POST", "/v1/completions"),
        ("GET", "/metrics"),
        ("GET", "/page/page.css"),
    ]:
        answer = send(server, method, path, {"Host": "127.0.0.1"})
        assert answer.headers["x-content-type-options"] == "nosniff", path


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_hosts": ["http://a"]},
        {"allowed_hosts": [" "]},
        {"allowed_origins": ["app.example.org"]},
        {"allowed_origins": ["https://a/path"]},
    ],
)
def test_a_flag_that_names_no_host_or_origin_is_refused(settings: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match="--allowed-"):
        Origins(**settings)
