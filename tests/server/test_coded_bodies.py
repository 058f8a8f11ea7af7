"""Bodies that clients compressed or cut in the middle of a character, and answers for clients of HTTP/1.0."""

from __future__ import annotations

import gzip
import json
import re
import zlib

import pytest
import zstandard

from tests.hostile.raw import HEAD, RawClient
from tests.server.running import RunningServer
from weft.text.arrangement import argument_object
from weft.text.surrogates import whole_characters

SERVER = {"max_body_mb": 3, "max_buffered_mb": 4}
CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "say:hé"}]}).encode()
ZSTD = zstandard.ZstdCompressor().compress


def sent(server: RunningServer, raw: bytes, coding: str) -> tuple[int, dict[str, object]]:
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = server.post(CHAT, content=raw, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("coding", "raw"),
    [("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY)), ("ZSTD", ZSTD(BODY)), ("identity", BODY)],
)
def test_a_compressed_body_is_read(server: RunningServer, coding: str, raw: bytes) -> None:
    status, answer = sent(server, raw, coding)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "hé"  # type: ignore[index]


@pytest.mark.parametrize(
    ("coding", "raw", "status", "words"),
    [
        ("br", BODY, 415, "compressed as 'br'; this server reads gzip"),
        ("gzip, gzip", BODY, 415, "compressed as 'gzip, gzip'"),
        ("gzip", BODY, 400, "the body is not gzip"),
        ("gzip", gzip.compress(BODY)[:-9], 400, "it is cut"),
        ("gzip", gzip.compress(BODY) + b"x", 400, "other bytes follow"),
        ("zstd", b"{}", 400, "the body is not zstd"),
        ("gzip", gzip.compress(b" " * 200_000_000), 413, "limits.max_body_mb"),
        ("zstd", ZSTD(b" " * 200_000_000), 413, "limits.max_body_mb"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(
    server: RunningServer, coding: str, raw: bytes, status: int, words: str
) -> None:
    got, answer = sent(server, raw, coding)
    assert (got, words in answer["error"]["message"]) == (status, True), answer  # type: ignore[index]


def test_half_of_a_character_is_read_as_one_that_is_missing(server: RunningServer) -> None:
    raw = BODY.replace(rb"h\u00e9", rb"a\ud83d b\ude00\\ud83d \ud83d\ude00")
    answer = server.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.json()["choices"][0]["message"]["content"] == "a\ufffd b\ufffd\\ud83d 😀"
    assert argument_object(r'{"a": "x\ud83d"}') == {"a": "x\ufffd"}
    assert server.post(CHAT, content=raw[:-9] + rb"\ud83d", headers={"content-type": "application/json"}).is_error


@pytest.mark.parametrize(
    "text",
    [r'"\ud83d"', r'"\ud83d\ud83d\ude00"', r'"\\ud83d\ude00"', r'"\\\ud83dx"', r'"\udc00\u0041"', r'"\uDBFF\uDFFF"'],
)
def test_pairs_and_texts_that_look_like_escapes_stay(text: str) -> None:
    replaced = json.loads(whole_characters(text.encode()))
    assert replaced == re.sub("[\ud800-\udfff]", "\ufffd", json.loads(text))


def test_an_answer_to_http_1_0_has_no_chunks(server: RunningServer) -> None:
    for more in ({"stream": True}, {}):
        body = json.dumps({**json.loads(BODY), **more}).encode()
        with RawClient(server.url) as client:
            client.send(b"POST %s HTTP/1.0\r\n%sContent-Length: %d\r\n\r\n" % (CHAT.encode(), HEAD, len(body)) + body)
            head, _, rest = client.everything().partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert rest.startswith(b"data: {" if more else b'{"id"')
        assert rest.endswith(b"data: [DONE]\n\n" if more else b"}")
