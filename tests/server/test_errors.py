"""What a client is told of an exception that nobody meant to raise."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from starlette.requests import Request

from weft.errors import RequestError, WeftError
from weft.server.errors import error_headers, error_response, on_bug
from weft.server.models import unknown_model


def test_a_bug_says_where_to_look_and_that_its_connection_ends() -> None:
    """The server closes it: a client that used it again would find it broken."""
    answer = asyncio.run(on_bug(Request({"type": "http"}), ZeroDivisionError("secret")))
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")
    message = msgspec.json.decode(answer.body)["error"]["message"]
    assert "ZeroDivisionError" in message
    assert "log" in message
    assert "secret" not in message
    assert "connection" not in error_response(RequestError("n is 0"), {}).headers


@pytest.mark.parametrize(("status", "name"), [(429, "retry-after"), (503, "retry-after"), (401, "www-authenticate")])
def test_an_error_says_when_to_try_again_or_what_it_wants(status: int, name: str) -> None:
    error = WeftError("no")
    error.status = status
    assert list(error_headers(error)) == [name]
    error.status = 400
    assert error_headers(error) == {}


def test_an_unknown_model_names_some_of_the_others_and_how_many_more_there_are() -> None:
    names = [f"m{number}" for number in range(100)]
    assert "more" not in unknown_model("x", names[:3]).message
    shown = unknown_model("x", names).message
    count = len(re.findall(r"'m\d+'", shown))
    assert 0 < count < 100
    assert f"and {100 - count} more" in shown
    assert "more" not in unknown_model("x", names[:count]).message
