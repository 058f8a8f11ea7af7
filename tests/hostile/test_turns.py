"""The longest turn of the event loop: reading a body that is parsed there, and checking what a large one asks for.

Seconds are those of the CPU for this thread, the least of several runs: other work on the machine does not count.
Bodies are as large as the loop parses; what is checked may be of any size that a body can have.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import pytest

from weft.errors import RequestError
from weft.server.protocol import (
    LARGE_BODY_BYTES,
    ChatBody,
    CompletionBody,
    begin_request,
    parse_body,
    prompts_of,
    sampling_params,
)

TURN_MAX_S = 0.05
VOCAB_SIZE = 150_000
SIZE = LARGE_BODY_BYTES - 200


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    count = (SIZE - len(start) - len(end)) // (len(item) + 1)
    return start + b",".join([item] * count) + end


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "a", **fields}).encode()


BODIES = {
    "ids": filled(b'{"prompt":[', b"1", b"]}"),
    "texts": filled(b'{"prompt":[', b'""', b"]}"),
    "objects": filled(b'{"prompt":"a","metadata":[', b"{}", b"]}"),
    "small objects": filled(b'{"prompt":"a","metadata":[', b'{"a":1}', b"]}"),
    "keys": completion(metadata={str(number): 0 for number in range(SIZE // 13)}),
    "unknown fields": completion(**{f"f{number}": 0 for number in range(SIZE // 13)}),
    "bias": completion(logit_bias={str(number): 0 for number in range(SIZE // 13)}),
    "messages": filled(b'{"messages":[', b'{"role":"user","content":""}', b"]}"),
    "escapes": b'{"prompt":"' + b"\\n" * (SIZE // 2) + b'"}',
    "depth": b'{"prompt":"a","metadata":' + b"[" * 60_000 + b"]" * 60_000 + b"}",
}
LARGE = {
    "stop_token_ids": {"stop_token_ids": list(range(VOCAB_SIZE)) * 6},
    "allowed_token_ids": {"allowed_token_ids": list(range(VOCAB_SIZE))},
    "logit_bias": {"logit_bias": {str(token): 1.0 for token in range(VOCAB_SIZE)}},
    "prompt": {"prompt": [1] * 900_000},
}


def least_seconds(work: Callable[[], object], runs: int = 5) -> float:
    seconds = []
    for _ in range(runs):
        began_s = time.thread_time()
        with contextlib.suppress(RequestError):
            work()
        seconds.append(time.thread_time() - began_s)
    return min(seconds)


@pytest.mark.parametrize("name", BODIES)
def test_no_body_that_is_parsed_on_the_loop_takes_fifty_milliseconds(name: str) -> None:
    raw = BODIES[name]
    assert len(raw) <= LARGE_BODY_BYTES
    begin_request(strict=False)
    body_type = ChatBody if name == "messages" else CompletionBody
    assert least_seconds(lambda: parse_body(raw, body_type)) < TURN_MAX_S


@pytest.mark.parametrize("name", LARGE)
def test_no_list_of_a_large_body_takes_fifty_milliseconds_to_check(name: str) -> None:
    body = parse_body(completion(**LARGE[name]), CompletionBody)

    def check() -> None:
        prompts_of(body.prompt)
        sampling_params(body, {}, max_tokens=5, grammar=None).check(VOCAB_SIZE)

    assert least_seconds(check) < TURN_MAX_S
