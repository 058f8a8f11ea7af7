"""Fields that no dialect knows: however many a request has, they cost a bounded number of hints."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.hostile.counted import counted
from weft.errors import RequestError
from weft.server.ollama.protocol import read_options
from weft.server.protocol import UNKNOWN_FIELDS_MAX, CompletionBody, parse_body
from weft.text.current_request import begin_request


def similar_names(count: int) -> list[str]:
    """Names of the letters of ``presence_penalty``: for each one difflib compares every known field."""
    letters = random.Random(1)
    names = {"".join(letters.sample("presence_penalty", 16)) for _ in range(count + 100)}
    return sorted(names)[:count]


def completion(names: list[str]) -> None:
    body = {"prompt": "a", **dict.fromkeys(names, 0)}
    parse_body(json.dumps(body).encode(), CompletionBody)


def options(names: list[str]) -> None:
    read_options(dict.fromkeys(names, 0))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("read", [completion, options])
def test_a_request_costs_few_hints_however_many_fields_are_unknown(
    read: Callable[[list[str]], Any], strict: bool
) -> None:
    calls = []
    for count in (8, UNKNOWN_FIELDS_MAX):
        begin_request(strict=strict)
        refused = pytest.raises(RequestError) if strict else contextlib.nullcontext()
        with counted() as work, refused:
            read(similar_names(count))
        calls.append(work.calls)
    assert calls[1] - calls[0] < 100 * UNKNOWN_FIELDS_MAX  # one hint is thousands of calls


@pytest.mark.parametrize("read", [completion, options])
def test_more_unknown_fields_than_the_limit_are_refused_in_one_sentence(read: Callable[[list[str]], Any]) -> None:
    begin_request(strict=False)
    names = similar_names(40_000)
    with counted() as work, pytest.raises(RequestError) as refused:
        read(names)
    assert f"40000 unknown fields; the limit is {UNKNOWN_FIELDS_MAX}" in str(refused.value)
    assert work.calls < 6 * len(names)
