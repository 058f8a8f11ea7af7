"""``weft batch``: a file of requests in, a file of answers out; resumed, refused, interrupted."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from weft.config import EngineConfig
from weft.errors import RequestError
from weft.server.batches.answering import BatchCounts, RunInterruptedError, in_order, run_file
from weft.server.batches.lines import (
    BLOCK_CHARS,
    BadInputError,
    OutputFile,
    encode_output,
    output_line,
    prefix_key,
    read_body_of,
    read_index,
)
from weft.server.config import ServerConfig

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def line(custom_id: str, url: str = URLS[0], **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(text) for text in path.read_text("utf-8").splitlines()]
    by_id = {one["custom_id"]: one for one in lines}
    assert len(by_id) == len(lines)
    return by_id


def run(source: Path, output: Path, model: Path, *, factory: str = "build", on_answer: Any = None) -> BatchCounts:
    return run_file(
        source,
        output,
        EngineConfig.of(model=str(model)),
        ServerConfig(file_store="off", response_store="off"),
        on_progress=lambda text: None,
        on_answer=on_answer or (lambda counts: None),
        factory=f"tests.server.scripted_engine:{factory}",
    )


def test_a_file_may_begin_with_a_mark_and_have_an_emoji_that_was_cut(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    first, second = (json.dumps(line(name, prompt="x\ud83d")) for name in "ab")
    source.write_bytes(b"\xef\xbb\xbf" + f"{first}\r\n\r\n{second}\n".encode())
    bodies = [json.loads(read_body_of(source, one)) for one in read_index(source, urls=URLS)]
    assert bodies == [{"prompt": "x\ufffd"}] * 2


def test_a_line_beyond_the_limit_of_bytes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.batches.lines.LINE_BYTES_MAX", 200)
    source = write(tmp_path / "in.jsonl", [line("a", prompt="x"), line("b", prompt="x" * 200)])
    with pytest.raises(BadInputError, match=r"line 2: it has \d+ bytes; the limit is 200") as refusal:
        read_index(source, urls=URLS)
    assert refusal.value.code == "line_too_long"


def test_each_line_gets_what_its_endpoint_would_answer_and_a_second_run_only_the_rest(
    tmp_path: Path, model_directory: Path
) -> None:
    turns = [{"role": "user", "content": "say:hi"}]
    lines = [
        line("text", prompt="say:one"),
        line("chat", URLS[1], messages=turns),
        line("response", URLS[2], input="say:three"),
        line("wrong", prompt="x", temperature=200),
        line("stream", prompt="x", stream=True),
        line("nobody", prompt="x", model="other"),
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    counts = run(source, output, model_directory)
    assert (counts.total, counts.done, counts.earlier, counts.failed) == (6, 6, 0, 3)
    by_id = answers(output)
    assert by_id["text"]["response"]["body"]["choices"][0]["text"] == "one"
    assert by_id["text"]["response"]["status_code"] == 200
    assert by_id["text"]["id"].startswith("batch_req_")
    assert by_id["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "hi"
    assert by_id["response"]["response"]["body"]["output"][0]["content"][0]["text"] == "three"
    assert {name: one["response"]["status_code"] for name, one in by_id.items()} == {
        "text": 200,
        "chat": 200,
        "response": 200,
        "wrong": 400,
        "stream": 400,
        "nobody": 404,
    }
    assert by_id["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert all(one["error"] is None for one in by_id.values())

    # A second run: one line more, and a torn last line from an interruption.
    before = output.read_bytes()
    write(source, [*lines, line("late", prompt="say:four")])
    output.write_bytes(before + b'{"id": "batch_req_9", "custom_id": "la')
    counts = run(source, output, model_directory)
    assert (counts.total, counts.earlier, counts.done, counts.failed) == (7, 6, 1, 3)
    assert output.read_bytes().startswith(before)
    assert answers(output)["late"]["response"]["body"]["choices"][0]["text"] == "four"


def test_an_interrupted_run_leaves_whole_lines_and_goes_on(tmp_path: Path, model_directory: Path) -> None:
    # Five answers of 40 tokens, and others that need seconds more.
    source = write(
        tmp_path / "in.jsonl",
        [line(f"r{i}", prompt=f"say:{'x' * (40 if i < 5 else 700)}", max_tokens=700) for i in range(40)],
    )
    output = tmp_path / "out.jsonl"

    def stop_after_five(counts: BatchCounts) -> None:
        if counts.done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(RunInterruptedError) as stopped:
        run(source, output, model_directory, factory="build_slow", on_answer=stop_after_five)
    left = answers(output)
    assert 5 <= len(left) == stopped.value.counts.done < 40
    counts = run(source, output, model_directory)
    assert (counts.earlier, counts.earlier + counts.done, counts.failed) == (len(left), 40, 0)
    assert answers(output).items() >= left.items()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (line("a", prompt="x"), "custom_id 'a' is also that of line 1"),
        ({"custom_id": "b", "url": URLS[0], "body": {}}, "method"),
        ({**line("b"), "method": "GET"}, "must be POST"),
        (line("b", "/v1/audio"), "/v1/audio"),
        ({**line("b"), "body": [1]}, "body is not an object"),
        (line(""), "custom_id"),
        (line("b" * 600), "512"),
    ],
)
def test_a_bad_line_is_refused_before_anything_is_computed(tmp_path: Path, bad: Any, words: str) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", prompt="x"), bad])
    with pytest.raises(BadInputError, match=r"^line 2: ") as error:
        run(source, tmp_path / "out.jsonl", tmp_path)
    assert words in error.value.message
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_of_other_requests_or_of_another_run_is_left_alone(tmp_path: Path) -> None:
    index = read_index(write(tmp_path / "in.jsonl", [line("a"), line("b")]), urls=URLS)
    answer = encode_output(output_line(index[0], 200, b"{}"))
    output = tmp_path / "out.jsonl"
    output.write_bytes(answer)
    with pytest.raises(RequestError, match="not in the input"):
        OutputFile(output, {"b"})
    output.write_bytes(b"no answer\n" + answer)
    with pytest.raises(RequestError, match="line 1 is not an answer"):
        OutputFile(output, {"a", "b"})
    assert output.read_bytes() == b"no answer\n" + answer
    output.write_bytes(answer)
    first = OutputFile(output, {"a", "b"})
    with pytest.raises(RequestError, match="another run"):
        OutputFile(output, {"a", "b"})
    first.close()
    with pytest.raises(RequestError, match="the output is the input"):
        run(tmp_path / "in.jsonl", tmp_path / "in.jsonl", tmp_path)


def test_lines_with_the_same_beginning_are_neighbours(tmp_path: Path) -> None:
    def chat(system: int, user: int) -> dict[str, Any]:
        turns = [
            {"role": "system", "content": f"{system} " * BLOCK_CHARS},
            {"role": "user", "content": f"question {user}"},
        ]
        return line(f"{system}-{user}", URLS[1], messages=turns)

    lines = [chat(system, user) for user in range(5) for system in range(4)]
    index = in_order(read_index(write(tmp_path / "in.jsonl", lines), urls=URLS))
    systems = [one.custom_id.partition("-")[0] for one in index]
    changes = sum(a != b for a, b in itertools.pairwise(systems))
    assert changes == 3
    assert len({one.custom_id for one in index}) == 20
    # The control: the order of the file changes the system prompt at every line.
    assert len({one["custom_id"][0] for one in lines[:4]}) == 4


def test_a_key_has_the_hashes_of_its_beginning_and_takes_any_json() -> None:
    long = json.dumps({"prompt": "a" * 1000})
    longer = json.dumps({"prompt": "a" * 2000, "temperature": 0})
    assert prefix_key(longer.encode())[:12] == prefix_key(long.encode())[:12]
    assert prefix_key(b'{"prompt": "b"}') != prefix_key(b'{"prompt": "c"}')
    for odd in (b"[", b"[]", b"3", b'{"messages": 3}', b'{"prompt": [1, [2], "x"]}', b"{}"):
        assert isinstance(prefix_key(odd), bytes)
