"""--api-key: nothing but /health without a key, and any of several keys."""

from __future__ import annotations

import openai
import pytest
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from tests.server.running import RunningServer
from weft.server.edge import Origins
from weft.server.gate import Gate
from weft.server.tenants import Keys

SERVER = {"api_key": ["first-key", "second-key"]}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/metrics",
        "/version",
        "/load",
        "/ping",
        "/nowhere",
        "/tokenize",
        "/v1/completions",
        "//health",
        "/health/",
    ],
)
def test_without_a_key_nothing_is_answered(server: RunningServer, path: str) -> None:
    response = server.get(path)
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "missing_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "x-request-id" in response.headers


@pytest.mark.parametrize(
    ("headers", "status", "kind", "said"),
    [
        ({}, 401, "authentication_error", "x-api-key: KEY"),
        ({"x-api-key": "wrong"}, 401, "authentication_error", "not one of the server's"),
        ({"x-api-key": "first-key", "Origin": "http://evil.example"}, 403, "permission_error", "evil.example"),
        ({"x-api-key": "first-key", "Host": "evil.example"}, 421, "permission_error", "--allowed-host"),
    ],
)
def test_a_refusal_at_the_gate_has_the_shape_of_its_path(
    server: RunningServer, headers: dict[str, str], status: int, kind: str, said: str
) -> None:
    response = server.post("/v1/messages", headers=headers, content=b"")
    assert response.status_code == status
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert said in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    "header",
    [
        "Bearer wrong",
        "Bearer first-keyx",
        "Bearer",
        "Basic first-key",
        "first-key",
        "Bearer first-key,second-key",
        "Bearer fïrst",
    ],
)
def test_a_wrong_key_is_refused(server: RunningServer, header: str) -> None:
    response = server.get("/v1/models", headers={"Authorization": header.encode()})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "first-key" not in response.text


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_every_right_key_works(server: RunningServer, key: str) -> None:
    assert server.client(api_key=key).models.list().data
    assert server.get("/metrics", headers={"Authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/cache", "/v1/models"])
def test_an_operators_key_opens_everything_and_alone_what_adds_up_over_clients(path: str) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("in")(scope, receive, send)

    def status(gate: Gate, key: str) -> int:
        client = TestClient(gate, base_url="http://127.0.0.1")
        return client.get(path, headers={"Authorization": f"Bearer {key}"} if key else {}).status_code

    guarded = Gate(answer, keys=Keys(["client"], ["boss"]), origins=Origins())
    is_open = path == "/v1/models"
    assert [status(guarded, key) for key in ("boss", "client", "other", "")] == [200, 200 if is_open else 403, 401, 401]
    without_clients = Gate(answer, keys=Keys([], ["boss"]), origins=Origins())
    others = 200 if is_open else 401
    assert [status(without_clients, key) for key in ("boss", "other", "")] == [200, others, others]
    without_operators = Gate(answer, keys=Keys(["client"]), origins=Origins())
    assert status(without_operators, "client") == 200


def test_health_needs_no_key(server: RunningServer) -> None:
    assert server.get("/health").status_code == 200


def test_the_openai_client_raises_its_own_error(server: RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="nope").models.list()


def test_the_banner_prints_no_key(server: RunningServer) -> None:
    assert "first-key" not in server.output
    assert "$WEFT_API_KEY" in server.output
