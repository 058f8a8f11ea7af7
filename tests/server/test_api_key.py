"""--api-key: nothing but /health without a key, and any of several keys."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from tests.server.running import RunningServer
from weft.server.banner import print_places
from weft.server.config import ServerConfig
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


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await Response("in")(scope, receive, send)


def status(gate: Gate, key: str, path: str, method: str = "GET", address: str | None = "127.0.0.1") -> int:
    """Return the status of a request by a client at ``address``; None: one at a Unix socket."""

    async def at_address(scope: Scope, receive: Receive, send: Send) -> None:
        await gate({**scope, "client": address and (address, 1234)}, receive, send)

    client = TestClient(at_address, base_url="http://127.0.0.1")
    return client.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {}).status_code


@pytest.mark.parametrize("path", ["/metrics", "/v1/cache", "/v1/models"])
def test_an_operators_key_opens_everything_and_alone_what_adds_up_over_clients(path: str) -> None:
    guarded = Gate(answer, keys=Keys(["client"], ["boss"]), origins=Origins())
    is_open = path == "/v1/models"
    assert [status(guarded, key, path) for key in ("boss", "client", "other", "")] == [
        200,
        200 if is_open else 403,
        401,
        401,
    ]
    without_clients = Gate(answer, keys=Keys([], ["boss"]), origins=Origins())
    others = 200 if is_open else 401
    assert [status(without_clients, key, path) for key in ("boss", "other", "")] == [200, others, others]
    without_operators = Gate(answer, keys=Keys(["client"]), origins=Origins())
    assert status(without_operators, "client", path) == 200


@pytest.mark.parametrize("keys", [Keys([]), Keys(["client"])])
def test_without_an_operator_key_a_change_for_all_needs_a_client_of_this_machine(keys: Keys) -> None:
    gate = Gate(answer, keys=keys, origins=Origins())
    here, elsewhere = ("127.0.0.1", "::1", "::ffff:127.0.0.1", None), ("192.0.2.7", "2001:db8::7", "::ffff:192.0.2.7")
    for method, path in (("POST", "/sleep"), ("POST", "/v1/load_lora_adapter"), ("DELETE", "/api/delete")):
        assert {status(gate, "client", path, method, client) for client in here} == {200}
        assert {status(gate, "client", path, method, client) for client in elsewhere} == {403}
    assert {status(gate, "client", "/metrics", "GET", client) for client in elsewhere} == {200}, (
        "reading changes nothing"
    )
    assert {status(gate, "client", "/v1/chat/completions", "POST", client) for client in elsewhere} == {200}
    with_operator = Gate(answer, keys=Keys(["client"], ["boss"]), origins=Origins())
    assert {status(with_operator, "boss", "/sleep", "POST", client) for client in elsewhere} == {200}


def test_an_open_address_without_a_key_is_warned_of() -> None:
    def shown(**settings: Any) -> str:
        lines: list[str] = []
        print_places(lambda text="", style="": lines.append(text), "http://x", "", ServerConfig(**settings))
        return "\n".join(lines)

    for host in ("0.0.0.0", "::", "", "192.0.2.7"):
        assert "any client that reaches" in shown(host=host)
        assert "--api-key-file" in shown(host=host)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert "any client" not in shown(host=host)


def test_health_needs_no_key(server: RunningServer) -> None:
    assert server.get("/health").status_code == 200


def test_the_openai_client_raises_its_own_error(server: RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="nope").models.list()


def test_the_banner_prints_no_key(server: RunningServer) -> None:
    assert "first-key" not in server.output
    assert "$WEFT_API_KEY" in server.output
