"""What a client is told of an exception that nobody meant to raise."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request

from weft.errors import RequestError
from weft.server.errors import error_response, on_bug


def test_a_bug_says_where_to_look_and_that_its_connection_ends() -> None:
    """The server closes it: a client that used it again would find it broken."""
    answer = asyncio.run(on_bug(Request({"type": "http"}), ZeroDivisionError("secret")))
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")
    message = msgspec.json.decode(answer.body)["error"]["message"]
    assert "ZeroDivisionError" in message
    assert "log" in message
    assert "secret" not in message
    assert "connection" not in error_response(RequestError("n is 0"), {}).headers
