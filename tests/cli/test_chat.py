"""The conversation, driven without a terminal; and the client under it, without a server."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.cli.chat import Conversation, talk
from weft.cli.main import main
from weft.cli.remote import AnswerDelta, RemoteModel
from weft.errors import ConfigError, EngineUnavailableError, UserError, WeftError

Answer = Callable[[list[dict[str, Any]]], Generator[AnswerDelta, None, None]]


class FakeModel:
    """Answers by a function of the messages, and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[list[dict[str, Any]]] = []
        self.limits: list[int | None] = []

    def stream_chat(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Generator[AnswerDelta, None, None]:
        self.asked.append(messages)
        self.limits.append(fields.get("max_tokens"))
        return self.answer(messages)


def _counting(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
    yield AnswerDelta("you said ")
    yield AnswerDelta(f"{sum(m['role'] == 'user' for m in messages)} things")
    yield AnswerDelta(finish_reason="stop")
    yield AnswerDelta(
        usage={"prompt_tokens": 2048, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1920}}
    )


def _chat(
    *lines: str,
    answer: Answer = _counting,
    system: str | None = None,
    context: int = 0,
    fields: dict[str, Any] | None = None,
) -> tuple[FakeModel, str]:
    """(the model, everything written) after typing ``lines``; a KeyboardInterrupt line is a Ctrl-C."""
    model, written, left = FakeModel(answer), [], list(lines)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if line == "^C":
            raise KeyboardInterrupt
        return line

    talk(model, Conversation(system, context_tokens=context), fields or {}, read=read, write=written.append)
    return model, "".join(written)


def test_reasoning_is_shown_before_the_answer_and_not_kept() -> None:
    def thinking(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        yield AnswerDelta(reasoning="hm, ")
        yield AnswerDelta(reasoning="well")
        yield AnswerDelta("Yes.")

    model, written = _chat("one", "two", answer=thinking)
    assert "well" in written.split("\n\nYes.")[0]
    assert model.asked[1][1] == {"role": "assistant", "content": "Yes."}


def test_each_turn_brings_the_whole_conversation() -> None:
    model, written = _chat("one", "two", system="Be brief.")
    assert [m["role"] for m in model.asked[1]] == ["system", "user", "assistant", "user"]
    assert model.asked[1][2]["content"] == "you said 1 things"
    assert "you said 2 things" in written


def test_what_the_answer_cost_and_what_the_cache_saved_is_shown() -> None:
    _, written = _chat("one")
    assert "4 tokens, first after " in written
    assert "1,920 of 2,048 prompt tokens from cache" in written


def test_reset_forgets_and_exit_leaves() -> None:
    model, _ = _chat("one", "/reset please", "two", "/exit now", "three", system="Be brief.")
    assert len(model.asked) == 2
    assert [m["content"] for m in model.asked[1]] == ["Be brief.", "two"]


def test_an_unknown_command_is_not_sent_to_the_model() -> None:
    model, written = _chat("/rest", "/help")
    assert model.asked == []
    assert "there is no /rest; the commands are:" in written
    assert written.count("/reset  forget") == 2


def test_quotes_hold_a_message_of_several_lines_and_blank_lines_are_no_message() -> None:
    model, _ = _chat("", "   ", '"""a: 1', "", 'b: 2"""', '"""', "c", '"""')
    assert [asked[-1]["content"] for asked in model.asked] == ["a: 1\n\nb: 2", "c"]


def test_ctrl_c_in_an_answer_keeps_what_was_said_and_at_the_prompt_keeps_the_chat() -> None:
    def interrupted(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        yield AnswerDelta("so far")
        if len(messages) == 1:
            raise KeyboardInterrupt

    model, written = _chat("one", "^C", "two", answer=interrupted)
    assert ", stopped" in written
    assert [m["content"] for m in model.asked[1]] == ["one", "so far", "two"]


def test_a_failed_turn_leaves_no_trace_in_the_conversation() -> None:
    def failing(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        if messages[-1]["content"] == "too long":
            raise UserError("5000 tokens are more than 4096")
        yield from _counting(messages)

    model, written = _chat("one", "too long", "two", answer=failing)
    assert "error: 5000 tokens are more than 4096\n" in written
    assert [m["content"] for m in model.asked[2]] == ["one", "you said 1 things", "two"]


def _endless(tokens: int) -> Answer:
    """Each answer runs to its limit, or to the end of a context of ``tokens``."""
    used = [0]

    def answer(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        if used[0] + 20 > tokens:
            raise UserError(f"the prompt has {used[0] + 20} tokens; the longest context served is {tokens} tokens")
        prompt, made = used[0] + 20, min(tokens // 2, tokens - used[0] - 20)
        used[0] = prompt + made
        yield AnswerDelta("rrr")
        yield AnswerDelta(finish_reason="length", usage={"prompt_tokens": prompt, "completion_tokens": made})

    return answer


def test_an_answer_has_a_limit_of_half_the_context_and_says_when_it_was_reached() -> None:
    model, written = _chat("one", "two", "three", answer=_endless(4096), context=4096)
    assert model.limits == [2048, None, None]  # of what is left the server makes an answer of its own length
    _, first, second = written.split("rrr\n")
    assert "; cut at the limit of 2,048 tokens (--max-tokens)" in first
    assert "; cut at the end of the context: /reset forgets the conversation" in second
    assert second.endswith("the longest context served is 4096 tokens\n/reset forgets the conversation\n")


def test_a_long_context_leaves_the_limit_at_its_default_and_a_given_one_wins() -> None:
    assert _chat("one", "two", context=100_000)[0].limits == [4096, 4096]
    assert _chat("one", "two")[0].limits == [4096, 4096]
    assert _chat("one", "two", context=100, fields={"max_tokens": 90})[0].limits == [90, 90]


def test_a_stopped_answer_counts_towards_the_context_and_a_reset_frees_it() -> None:
    def stopped(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        yield AnswerDelta("x" * 600)
        raise KeyboardInterrupt

    assert _chat("one", "two", "/reset", "three", answer=stopped, context=1000)[0].limits == [500, None, 500]


def test_the_first_message_is_not_told_to_forget_the_conversation() -> None:
    def refusing(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        raise UserError("the longest context served is 8 tokens", code="context_length_exceeded")
        yield

    assert "/reset" not in _chat("one", answer=refusing)[1]


@pytest.mark.parametrize(("terminal", "answer", "code"), [(False, 400, 1), (False, 200, 0), (True, 400, 0)])
def test_a_failed_answer_is_exit_code_1_of_a_piped_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool, answer: int, code: int
) -> None:
    class Stdin(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    def stream(
        self: RemoteModel, messages: list[dict[str, Any]], fields: dict[str, Any]
    ) -> Generator[AnswerDelta, None, None]:
        if answer != 200:
            raise UserError("too long")
        yield AnswerDelta("hi")

    monkeypatch.setattr("sys.stdin", Stdin("one\n"))
    monkeypatch.setattr("builtins.input", lambda prompt: sys.stdin.readline() or _end())
    monkeypatch.setattr(RemoteModel, "stream_chat", stream)
    monkeypatch.setattr(RemoteModel, "card", lambda self: {})
    assert main(["chat", "some-model", "--url", "http://127.0.0.1:9"]) == code
    assert ("error: too long" in capsys.readouterr().out) == (answer == 400)


def _end() -> str:
    raise EOFError


# ---------------------------------------------------------------- the client


def _remote(answer: Callable[[httpx.Request], httpx.Response], **more: Any) -> RemoteModel:
    return RemoteModel("http://somewhere:1/v1/", transport=httpx.MockTransport(answer), **more)


def _events(*chunks: Any) -> httpx.Response:
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return httpx.Response(200, text=": hello\n\n" + lines + "data: [DONE]\n\n")


def test_a_stream_becomes_pieces_and_the_first_listed_model_is_asked() -> None:
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        assert request.url.path == "/v1/chat/completions"
        seen.append((json.loads(request.content), request.headers.get("authorization")))
        return _events(
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "hi"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 1}},
        )

    remote = _remote(answer, api_key="secret")
    pieces = list(remote.stream_chat([{"role": "user", "content": "x"}], {"top_k": 3}))
    assert "".join(piece.text for piece in pieces) == "hi"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert pieces[-1].usage == {"completion_tokens": 1}
    body, key = seen[0]
    assert (body["model"], body["top_k"], body["stream"], key) == ("first", 3, True, "Bearer secret")


def _listing(owner: str) -> Callable[[httpx.Request], httpx.Response]:
    """A server of ``owner`` with one model; of another name it says what weft says."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "own/one", "owned_by": owner, "max_model_len": 64}]})
        if request.url.path == "/v1/models/default":
            return httpx.Response(200, json={"id": "own/one"})
        return httpx.Response(404, json={"error": {"message": f"there is no model {request.url.path}"}})

    return answer


def test_a_name_that_a_weft_does_not_serve_is_refused_before_the_first_message() -> None:
    with pytest.raises(UserError, match="there is no model /v1/models/foo/bar"):
        _remote(_listing("weft"), model="foo/bar").card()
    assert _remote(_listing("weft"), model="own/one").card()["max_model_len"] == 64
    assert _remote(_listing("weft"), model="default").card() == {"id": "own/one"}  # in no list, and served
    assert _remote(_listing("llamacpp"), model="foo").card() == {}  # others take any name


@pytest.mark.parametrize(
    ("response", "kind", "sentence"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), UserError, "too long"),
        (httpx.Response(401, json={"error": {"message": "no key"}}), UserError, "no key; give the key"),
        (httpx.Response(502, text="<html>"), WeftError, "answered 502"),
        (_events({"error": {"message": "engine died"}}), WeftError, "engine died"),
    ],
)
def test_what_a_server_refuses_is_said_in_its_own_words(
    response: httpx.Response, kind: type[WeftError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        list(_remote(lambda request: response, model="m").stream_chat([], {}))


def test_a_server_that_is_not_there_is_told_from_one_that_breaks_off() -> None:
    def absent(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset")

    with pytest.raises(ConfigError, match="start a server with `weft serve`"):
        list(_remote(absent, model="m").stream_chat([], {}))
    with pytest.raises(EngineUnavailableError, match="broke off"):
        list(_remote(broken, model="m").stream_chat([], {}))


def test_engine_flags_with_a_url_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--threads", "2", "--memory", "1GiB"]) == 2
    assert "--memory, --threads cannot change the server" in capsys.readouterr().err


def test_a_picture_goes_with_the_next_message_and_stays_in_the_conversation(tmp_path: Path) -> None:
    file = tmp_path / "my cat.png"
    file.write_bytes(b"pixels")
    model, written = _chat(f"/image '{file}'", "what is it?", "and now?")
    assert "my cat.png goes with the next message" in written
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cGl4ZWxz"}}
    assert model.asked[0][-1]["content"] == [shown, {"type": "text", "text": "what is it?"}]
    assert model.asked[1][0] == model.asked[0][-1]
    assert model.asked[1][-1]["content"] == "and now?"


def test_a_picture_that_cannot_be_read_or_is_refused_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(b"pixels")

    def refusing(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        if isinstance(messages[-1]["content"], list):
            raise UserError("no picture", param="messages[0].content[0]")
        yield AnswerDelta("yes")

    model, written = _chat(f"/image {tmp_path / 'dog.png'}", f"/image {file}", "one", "two", "/image", answer=refusing)
    assert "dog.png cannot be read: No such file" in written
    assert "error: no picture" in written
    assert model.asked[1] == [{"role": "user", "content": "two"}]
    assert "FILE: a picture for the next message" in written


def test_a_picture_stays_for_the_next_message_if_it_was_not_refused(tmp_path: Path) -> None:
    file, failed = tmp_path / "clip.mp4", []
    file.write_bytes(b"frames")

    def busy(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        if not failed:
            failed.append(True)
            raise UserError("the queue is full", param="messages" if messages == [] else None)
        yield AnswerDelta("yes")

    model, written = _chat(f"/video {file}", "one", "two", answer=busy)
    assert "error: the queue is full\nwhat you show still goes with the next message" in written
    shown = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,ZnJhbWVz"}}
    assert model.asked[1][-1]["content"] == [shown, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("status", "error", "param"),
    [
        (400, {"message": "no", "param": "messages[1].content[0]"}, "messages[1].content[0]"),
        (400, {"message": "no"}, "messages"),
        (400, {"message": "no", "param": "seed"}, "seed"),
        (503, {"message": "no"}, None),
        (401, {"message": "no"}, None),
    ],
)
def test_what_a_server_refuses_is_known_by_its_field(status: int, error: dict[str, str], param: str | None) -> None:
    model = _remote(lambda request: httpx.Response(status, json={"error": error}), model="m")
    with pytest.raises(WeftError) as caught:
        list(model.stream_chat([], {}))
    assert caught.value.param == param
