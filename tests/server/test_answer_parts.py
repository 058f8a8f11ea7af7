"""Parts of answers without a server: messages from items, logprobs of a text, counts of logprobs, files of sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from starlette.datastructures import QueryParams

from weft.errors import RequestError
from weft.request import Request, SamplingParams
from weft.server.edge import ADDRESS_CELLS, SharedCounts
from weft.server.generation import logprob_count
from weft.server.listening import _file_of
from weft.server.logprobs import ChatTokenLogprob
from weft.server.ollama.protocol import max_tokens
from weft.server.presets import OllamaOptions
from weft.server.responses.answers import _covering
from weft.server.responses.items import messages_of, read_items
from weft.server.weights import _mode, read_update

RESPONSE = "resp_" + 32 * "0"


def test_items_of_one_answer_are_one_message_and_those_of_the_next_another() -> None:
    def said(text: str) -> dict[str, object]:
        return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}

    def thought(text: str) -> dict[str, object]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    def called(name: str) -> dict[str, object]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    def returned(name: str) -> dict[str, object]:
        return {"type": "function_call_output", "call_id": name, "output": "7"}

    items = [
        {"role": "user", "content": "a"},
        thought("one"),
        said("first"),
        called("f"),
        returned("f"),
        said("second"),
        said("third"),
        thought("two"),
        called("g"),
        called("h"),
    ]
    messages = messages_of(read_items(items, RESPONSE), None)
    assert [message.role for message in messages] == ["user", "assistant", "tool", *3 * ["assistant"]]
    texts = [message.content if isinstance(message.content, str) else None for message in messages]
    assert [text for text in texts if text] == ["a", "first", "7", "second", "third"]
    thoughts = [message.reasoning_content for message in messages]
    assert thoughts == [None, "one", None, None, None, "two"]
    calls = [[call["function"]["name"] for call in message.tool_calls or ()] for message in messages]
    assert calls == [[], ["f"], [], [], [], ["g", "h"]]


def test_the_logprobs_of_a_text_are_the_last_tokens_that_have_its_bytes() -> None:
    tokens = [ChatTokenLogprob(text, -1.0, list(text.encode()), []) for text in ("Hel", "lo", " wo", "rld")]
    for text, count in (("", 0), ("d", 1), ("rld", 1), ("orld", 2), ("lo world", 3), ("Hello world", 4), ("x" * 40, 4)):
        assert _covering(tokens, text) == tokens[len(tokens) - count :]


@pytest.mark.parametrize(
    ("asked", "streamed", "count"),
    [
        ({"max_tokens": 20, "logprobs": 4}, False, 20 * 5),
        ({"max_tokens": 20, "logprobs": 0, "n": 3}, False, 3 * 20),
        ({"max_tokens": None, "logprobs": 4}, False, 90 * 5),  # to the end of the context
        ({"max_tokens": 20, "logprobs": 4}, True, 0),  # written step by step
        ({"max_tokens": 20, "prompt_logprobs": 2, "n": 2}, True, 2 * 10 * 3),
        ({"max_tokens": 20, "logprobs": 4, "prompt_logprobs": 0}, False, 20 * 5 + 10),
        ({"max_tokens": 20}, False, 0),
    ],
)
def test_the_logprobs_of_an_answer_are_counted_before_it_begins(
    asked: dict[str, int], streamed: bool, count: int
) -> None:
    request = Request(request_id="a", prompt_tokens=list(range(10)), sampling=SamplingParams(**asked))
    assert logprob_count(request, 100, streamed=streamed) == count


def test_counts_that_processes_share_do_not_overlap(tmp_path: Path) -> None:
    ends = [SharedCounts(tmp_path / "counts", process=process, processes=2, keys=3) for process in range(2)]
    own = ends[0]
    keys = [own.key(number) for number in range(3)]
    tallies = [own.connections, own.buffered_bytes, own.requests, own.drains, *(key.bytes_in_flight for key in keys)]
    for number, tally in enumerate(tallies, start=1):
        tally.add(number)
    for number in range(4 * ADDRESS_CELLS):  # every cell of addresses
        own.address(str(number)).add(1)
    assert [tally.total() for tally in tallies] == [1, 2, 3, 4, 5, 6, 7]
    assert [list(cells) for key in keys for cells in (key.requests, key.tokens)] == 6 * [[0.0, 0.0]]
    assert ends[1].address("0").total() >= 1, "the other process counts the same clients"


def test_a_socket_is_the_same_file_whenever_it_was_touched_and_another_file_is_not(tmp_path: Path) -> None:
    regular, at_socket = tmp_path / "file", tmp_path / "socket"
    regular.write_text("a")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(at_socket))
        before = _file_of(regular), _file_of(at_socket)
        for path in (regular, at_socket):
            os.utime(path, ns=(1, 1))
        assert _file_of(regular) != before[0]
        assert _file_of(at_socket) == before[1]
    assert _file_of(tmp_path / "none") is None


def test_a_mode_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    assert _mode(QueryParams({"mode": "wait"}), "keep") == "wait"
    assert _mode(QueryParams({}), "keep") == "keep"
    with pytest.raises(RequestError, match=r"mode is 'x'; it may be keep, wait or abort$"):
        _mode(QueryParams({"mode": "x"}), "keep")


@pytest.mark.parametrize(("asked", "limit"), [(None, None), (-1, None), (-2, None), (-3, -3), (0, 0), (7, 7)])
def test_the_words_of_ollama_for_no_limit_are_none(asked: int | None, limit: int | None) -> None:
    assert max_tokens(OllamaOptions(num_predict=asked)) == limit


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ({"path": "/w"}, b""),
        ({"model_path": "/w"}, b""),
        ({}, b'{"path": "/w"}'),
        ({}, b'{"model_path": "/w"}'),
        ({"path": "/w"}, b'{"path": "/other", "model_path": "/other"}'),
        ({"model_path": "/w"}, b'{"path": "/other"}'),
    ],
)
def test_new_weights_are_at_the_path_under_either_name_and_the_query_wins(query: dict[str, str], body: bytes) -> None:
    assert read_update(QueryParams(query), body).directory == "/w"


@pytest.mark.parametrize(("body", "said"), [(b"", "path is missing"), (b'{"path": "w"}', "must be absolute")])
def test_new_weights_need_a_path_from_the_root(body: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_update(QueryParams({}), body)
