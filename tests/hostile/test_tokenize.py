"""Megabytes of text to tokenize, beside a client that is well-behaved."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.hostile.bystander import bystander, rss_of, rss_returns
from tests.server.running import RunningServer

SERVER = {"max_tokenize_chars": 2_000_000}


def tokenize(server: RunningServer, text: str) -> httpx.Response:
    return httpx.post(server.url + "/tokenize", json={"prompt": text}, timeout=120)


def test_long_texts_do_not_stall_others_and_their_memory_comes_back(server: RunningServer) -> None:
    text = "the cat sat on the mat, " * 60_000
    tokenize(server, text)
    time.sleep(1.5)  # its heap is trimmed half a second after: before that, what is left of the start counts as well
    before_bytes = rss_of(server.process.pid)
    with bystander(server) as other:
        answer = tokenize(server, text)
    assert answer.status_code == 200
    assert answer.json()["count"] == len(text)  # a token is a byte here
    other.check()
    assert rss_returns(server.process.pid, before_bytes, share=0.1)


def test_characters_that_are_tokenized_at_once_are_bounded(server: RunningServer) -> None:
    answer = tokenize(server, "x" * 2_000_001)
    assert answer.status_code == 413
    assert "limits.max_tokenize_chars" in answer.json()["error"]["message"]
    with ThreadPoolExecutor(4) as threads:
        codes = {
            future.result().status_code
            for future in [threads.submit(tokenize, server, "a b " * 300_000) for _ in range(4)]
        }
    assert codes <= {200, 503}
    assert 503 in codes
    assert tokenize(server, "a b").status_code == 200
