"""The conversation, driven without a terminal; and the client under it, without a server."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.cli.chat import converse
from weft.cli.conversation import Conversation, TerminalChat
from weft.cli.main import main
from weft.cli.remote import AnswerDelta, RemoteModel
from weft.errors import ConfigError, EngineUnavailableError, UserError, WeftError

Answer = Callable[[list[dict[str, Any]]], Generator[AnswerDelta, None, None]]


class FakeModel:
    """Answers by a function of the messages, and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[list[dict[str, Any]]] = []
        self.fields: list[dict[str, Any]] = []
        self.model = "first"

    @property
    def limits(self) -> list[int | None]:
        return [fields.get("max_tokens") for fields in self.fields]

    def names(self) -> list[str]:
        return ["first", "second"]

    def choose(self, name: str) -> dict[str, Any]:
        if name not in self.names():
            raise UserError(f"there is no model {name}")
        self.model = name
        return {"max_model_len": 600, "chat_sampling": {"temperature": 0.5}}

    def stream_chat(self, messages: list[dict[str, Any]], fields: dict[str, Any]) -> Generator[AnswerDelta, None, None]:
        self.asked.append(messages)
        self.fields.append(fields)
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

    TerminalChat(
        model, Conversation(system, context_tokens=context), fields or {}, read=read, write=written.append
    ).run()
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
    assert written.count("forget the conversation") == 2


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
    """Each message and each answer have a fixed number of tokens, and a server of ``tokens`` refuses what is longer."""

    def answer(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        prompt = 100 * sum(message["role"] == "user" for message in messages)
        prompt += 300 * sum(message["role"] == "assistant" for message in messages)
        prompt += sum(int(text) for message in messages for text in re.findall(r"big (\d+)", str(message["content"])))
        if prompt >= tokens:
            raise UserError(f"the prompt has {prompt} tokens", code="context_length_exceeded", param="messages")
        made = min(300, tokens - prompt)
        yield AnswerDelta("rrr")
        yield AnswerDelta(finish_reason="length", usage={"prompt_tokens": prompt, "completion_tokens": made})

    return answer


def test_an_answer_has_a_limit_of_half_the_context_and_says_when_it_was_reached() -> None:
    model, written = _chat("one", "two", answer=_endless(600), context=600)
    assert model.limits == [300, None]  # an answer takes what is left of the context
    _, first, second = written.split("rrr\n")
    assert "; cut at the limit of 300 tokens (/set max_tokens, --max-tokens)" in first
    assert "; cut at the end of the context" in second


def test_a_full_context_slides_by_halves_says_so_and_keeps_the_system_message() -> None:
    """Turns of 400 tokens in 2,000: after four the oldest go until at most 1,000 are left, then again after two."""
    model, written = _chat(*"abcdefg", answer=_endless(2000), context=2000, system="Be brief.")
    asked = ["".join(m["content"] for m in messages if m["role"] == "user") for messages in model.asked]
    assert asked == ["a", "ab", "abc", "abcd", "cde", "cdef", "efg"]
    assert all(messages[0] == {"role": "system", "content": "Be brief."} for messages in model.asked)
    assert written.count("the context of 2,000 tokens is full: the oldest 2 turns were dropped\n") == 2
    assert "error" not in written


def test_a_message_that_the_server_finds_too_long_drops_turns_and_is_asked_again() -> None:
    model, written = _chat("a", "b", "big 1500", answer=_endless(2000), context=2000)
    assert [m["content"] for m in model.asked[-1]] == ["big 1500"]
    assert written.count("were dropped") + written.count("was dropped") >= 1
    assert "error" not in written


def test_turns_that_were_dropped_in_vain_come_back() -> None:
    model, written = _chat("a", "b", "big 9000", "c", answer=_endless(2000), context=2000)
    assert "error: the prompt has 9100 tokens\n" in written
    assert [m["content"] for m in model.asked[-1]] == ["a", "rrr", "b", "rrr", "c"]


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


# ---------------------------------------------------------------- commands


def test_retry_asks_the_last_message_again_and_a_failure_leaves_the_old_answer() -> None:
    answers = iter(["bad", "good", None])

    def answer(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        text = next(answers, "fine")
        if text is None:
            raise UserError("busy")
        yield AnswerDelta(text)

    model, written = _chat("/retry", "one", "/retry", "/retry", "two", answer=answer)
    assert "error: /retry needs a message that was answered" in written
    assert [len(messages) for messages in model.asked] == [1, 1, 1, 3]
    assert [m["content"] for m in model.asked[3]] == ["one", "good", "two"]


def test_edit_replaces_the_last_message_and_leaves_its_picture(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"pixels")
    model, written = _chat("one", f"/image {tmp_path / 'cat.png'}", "two", "/edit", '/edit """three', 'lines"""')
    assert "the last message: two\n" in written
    asked = model.asked[2]
    assert asked[:2] == model.asked[1][:2]
    assert asked[2]["content"] == [model.asked[1][2]["content"][0], {"type": "text", "text": "three\nlines"}]


def test_the_system_message_changes_without_forgetting() -> None:
    model, written = _chat("one", "/system", "/system Be brief.", "two", "/system none", "three")
    assert "no system message\n" in written
    assert "system message: Be brief.\n" in written
    assert [m["content"] for m in model.asked[1]] == ["Be brief.", "one", "you said 1 things", "two"]
    assert [m["role"] for m in model.asked[2]] == ["user", "assistant"] * 2 + ["user"]


def test_another_model_answers_with_its_own_context_and_sampling() -> None:
    model, written = _chat("/model", "one", "/model third", "/model second", "two", context=4096)
    assert "* first\n  second\n" in written
    assert "error: there is no model third" in written
    assert "second answers from here on; temperature 0.5" in written
    assert model.fields[0] == {"max_tokens": 2048}
    assert model.fields[1]["temperature"] == 0.5  # and no limit: a turn of 2,052 tokens is over its 600
    assert len(model.asked[1]) == 1


def test_set_changes_sampling_and_without_a_value_takes_it_back() -> None:
    model, written = _chat(
        "/set temperature 0.25", "/set max-tokens 7", "/set stop a b", "one", "/set max_tokens", "two",
        fields={"top_p": 0.5},
    )  # fmt: skip
    assert model.fields[0] == {"top_p": 0.5, "temperature": 0.25, "max_tokens": 7, "stop": ("a b",)}
    assert model.fields[1]["max_tokens"] == 4096
    assert "temperature 0.25, top_p 0.5; answers of at most 7 tokens" in written


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/set temperature x", "temperature is 'x'"),
        ("/set temperature -1", "temperature"),
        ("/set mirostat 2", "/set has no mirostat; it takes max_tokens, temperature"),
        ("/save", "/save needs the name of a file"),
        ("/load /nowhere/x", "/nowhere/x cannot be read: No such file"),
        ("/image", "/image needs the name of a file"),
        ("/edit x", "/edit needs a message that was answered"),
    ],
)
def test_a_command_that_cannot_be_obeyed_is_one_line(line: str, sentence: str) -> None:
    model, written = _chat(line)
    assert f"error: {sentence}" in written
    assert written.count("\n") == 1
    assert model.asked == []


def test_a_saved_conversation_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    _, written = _chat("one", "/set top_k 3", f"/save {file}", f"/save {file}", system="Be brief.")
    assert written.endswith(f"1 turn in {file}\n" * 2)
    model, written = _chat("zero", f"/load '{file}'", "two")
    assert f"1 turn of {file}; first continues with top_k 3; answers" in written
    assert [m["content"] for m in model.asked[1]] == ["Be brief.", "one", "you said 1 things", "two"]
    assert model.fields[1]["top_k"] == 3


@pytest.mark.parametrize(
    "text", ["hello", "[]", '{"weft_chat": 2}', '{"weft_chat": 1, "messages": [{"role": "user"}], "tokens": []}']
)
def test_a_file_that_is_no_saved_conversation_is_neither_read_nor_overwritten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    model, written = _chat("one", f"/load {file}", f"/save {file}", "two")
    assert f"error: {file} is " in written
    assert f"error: {file} exists and is not a saved conversation" in written
    assert file.read_text() == text
    assert len(model.asked[1]) == 3


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


def test_a_name_that_is_refused_leaves_the_model_as_it_was() -> None:
    remote = _remote(_listing("weft"))
    assert remote.names() == ["own/one"]
    assert remote.choose("default") == {"id": "own/one"}
    with pytest.raises(UserError, match="there is no model"):
        remote.choose("foo")
    assert remote.model == "default"


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
    assert "error: /image needs the name of a file" in written


def test_a_picture_stays_for_the_next_message_if_it_was_not_refused(tmp_path: Path) -> None:
    file, failed = tmp_path / "clip.mp4", []
    file.write_bytes(b"frames")

    def busy(messages: list[dict[str, Any]]) -> Generator[AnswerDelta, None, None]:
        if not failed:
            failed.append(True)
            raise UserError("the queue is full", param="messages" if messages == [] else None)
        yield AnswerDelta("yes")

    model, written = _chat(f"/video {file}", "one", "two", answer=busy)
    assert "error: the queue is full\nthe pictures still go with the next message" in written
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


class SessionServer:
    """Keeps one session as a server of weft does, and says what was sent to it."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None
        self.refuses = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny", "max_model_len": 600}]})
        if request.url.path == "/v1/chat/completions":
            delta = {"choices": [{"index": 0, "delta": {"content": "fine"}, "finish_reason": "stop"}]}
            return httpx.Response(200, text=f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n")
        if request.method == "POST":
            if self.refuses:
                error = {"message": "you have 1000 sessions", "type": "rate_limit_error", "code": "too_many_sessions"}
                return httpx.Response(429, json={"error": error})
            self.saved = json.loads(request.content)
            return httpx.Response(200, json={})
        if self.saved is None:
            error = {"message": "there is no session", "type": "not_found_error", "code": "session_not_found"}
            return httpx.Response(404, json={"error": error})
        return httpx.Response(200, json={"messages": self.saved["messages"], "tokens": 40})

    def chat(self, *lines: str, system: str | None = None) -> str:
        """Everything written after typing ``lines`` in a chat of its own."""
        written, left = list[str](), list(lines)

        def read(prompt: str) -> str:
            if not left:
                raise EOFError
            return left.pop(0)

        model = RemoteModel("http://server", transport=httpx.MockTransport(self))
        converse(model, Conversation(system), {}, read=read, write=written.append, session="trip")
        return "".join(written)


def test_a_chat_with_a_session_goes_on_where_the_last_one_ended() -> None:
    server = SessionServer()
    assert "the session trip is new" in server.chat("one", "two", system="Be brief.")
    assert server.saved is not None
    assert server.saved["name"] == "trip"
    assert "goes on after 2 turns" in server.chat("three")
    said = [(one["role"], one["content"]) for one in server.saved["messages"]]
    assert said[0] == ("system", "Be brief.")
    assert [content for role, content in said if role == "user"] == ["one", "two", "three"]


def test_a_session_that_is_not_saved_costs_a_line_and_no_turn() -> None:
    server = SessionServer()
    server.refuses = True
    written = server.chat("one", "two")
    assert written.count("the session was not saved: you have 1000 sessions") == 2


def test_a_session_of_tokens_is_no_conversation_of_the_terminal() -> None:
    server = SessionServer()
    server.saved = {"messages": None}
    with pytest.raises(ConfigError, match="--session trip: it has no questions"):
        server.chat("one")
