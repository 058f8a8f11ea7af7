"""JSON bodies that are odd, deep, ambiguous or large, beside a client that is well-behaved."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.hostile.bystander import bystander
from tests.server.running import RunningServer

HI = [{"role": "user", "content": "say:x"}]


def post(server: RunningServer, raw: bytes, path: str = "/v1/completions") -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + path, content=raw, headers=headers, timeout=60)


def deep_call(depth: int) -> dict[str, Any]:
    function = {"name": "f", "arguments": "[" * depth + "]" * depth}
    call = {"id": "1", "type": "function", "function": function}
    return {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("path", "raw", "words"),
    [
        ("/v1/completions", b'{"prompt": "x", "seed": 1' + b"0" * 400 + b"}", "seed must be"),
        ("/v1/completions", b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", ""),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}", "max_tokens"),
        ("/v1/completions", b'{"prompt": [1' + b"0" * 5000 + b"]}", ""),
        ("/v1/completions", b'{"prompt": "x", "logit_bias": {"1' + b"0" * 400 + b'": 1}}', "logit_bias"),
        ("/v1/completions", b'{"prompt": "x", "prompt": "y"}', "'prompt' twice"),
        ("/v1/completions", b'{"prompt": "x", "a": [{"b": 1, "b": 2}]}', "'b' twice"),
        ("/v1/completions", b'{"prompt": "x", "a": ' + b"[" * 100_000, "nested too deeply"),
        ("/v1/completions", b'{"prompt": "\\ud80"}', ""),
        ("/v1/chat/completions", json.dumps(deep_call(100_000)).encode(), "nested too deeply"),
    ],
)
def test_an_odd_body_is_a_400(server: RunningServer, path: str, raw: bytes, words: str) -> None:
    answer = post(server, raw, path)
    assert answer.status_code == 400, answer.text[:300]
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps({"prompt": "x" * 20_000_000, "max_tokens": 1}).encode(),
        json.dumps({"prompt": "x", "a": [{"b": at} for at in range(200_000)]}).encode(),
    ],
    ids=["text", "objects"],
)
def test_a_large_body_does_not_stall_others(server: RunningServer, raw: bytes) -> None:
    with bystander(server) as other:
        assert post(server, raw).status_code in (200, 400)
    other.check()


@pytest.mark.parametrize("values", [b"{},", b"1,", b'"",', b"[{}],"])
def test_millions_of_values_are_refused_beside_others(server: RunningServer, values: bytes) -> None:
    raw = b'{"prompt": "x", "a": [' + values * (30_000_000 // len(values)) + b"0]}"
    with bystander(server) as other:
        answer = post(server, raw)
    assert answer.status_code == 413, answer.text
    assert "limits.max_json_values" in answer.json()["error"]["message"]
    other.check()


def test_a_long_text_full_of_commas_counts_once(server: RunningServer) -> None:
    answer = post(server, json.dumps({"prompt": '{"a", [1, 2]}, ' * 400_000}).encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"prompt": "x", "prompt": "y", "a": "%s"}' % (b"a" * 2_000_000), "'prompt' twice"),
        (b'{"prompt": "%s", "a": %s' % (b"a" * 2_000_000, b"[" * 100_000), "nested too deeply"),
        (b'{"prompt": NaN}', "'NaN}'; NaN is not JSON: send a number or null"),
        (b'{"prompt": "%s"' % (b"a" * 2_000_000), "not JSON"),
    ],
)
def test_an_odd_large_body_is_a_400(server: RunningServer, raw: bytes, words: str) -> None:
    answer = post(server, raw)
    assert answer.status_code == 400, answer.text[:300]
    assert words in answer.json()["error"]["message"]
