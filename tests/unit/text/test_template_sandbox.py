"""A chat template of a stranger runs in a process that may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.test_tools import TEMPLATES
from weft.errors import CheckpointError, ConfigError, RequestError
from weft.text.chat import ChatMessage, ChatTemplate, check_syntax
from weft.text.template_sandbox import TemplateSandbox
from weft.text.template_worker import ChatPrompt, chat_prompt

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SWITCH = (
    "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}"
    "{% if messages[0].content == 'many' %}"
    "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}{% endif %}"
    "{% if messages[0].content == 'huge' %}"
    "{{ 'x' * (2 * 10 ** 9 + messages | length) }}{% endif %}" + PLAIN
)


EMBEDDED = Path(__file__).resolve().parents[3] / "src/weft/embedded/weft-recall/chat_template.jinja"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "é🏔 <tag>"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ],
    [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": '{"t": 3}'},
    ],
    [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": "so", "reasoning": "hm", "tool_calls": [CALL]},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
]


@contextlib.contextmanager
def sandbox(source: str, **limits: Any) -> Iterator[TemplateSandbox]:
    asked = {"seconds": 1.0, "chars_max": 1_000_000, "memory_bytes": 128 << 20, **limits}
    template = TemplateSandbox(source, special_tokens={"bos_token": "<s>"}, origin="its template", **asked)
    try:
        yield template
    finally:
        template.close()


def turns(*contents: Any) -> list[ChatMessage]:
    return msgspec.convert([{"role": "user", "content": content} for content in contents], list[ChatMessage])


def write(template: TemplateSandbox, *contents: Any, **job: Any) -> ChatPrompt:
    return asyncio.run(template.write(turns(*contents), chars_cut=10**6, **job))


def test_the_sandbox_writes_what_the_template_writes_directly() -> None:
    messages = [*turns("hi", "é🏔" * 100_000, "10"), ChatMessage(role="assistant", content="so ")]
    cached = msgspec.structs.replace(messages[2], cache_control={"type": "ephemeral"})
    marked = [messages[0], cached, messages[1]]
    with sandbox(PLAIN) as template:
        direct = ChatTemplate(PLAIN, special_tokens={"bos_token": "<s>"})
        for given, more in (
            (messages, {}),
            (messages, {"continue_final_message": True}),
            (marked, {}),
            (messages, {"variables": {"messages": 1}}),
        ):
            try:
                expected: Any = chat_prompt(direct, given, chars_cut=10**6, **more)
            except RequestError as error:
                expected = error.message
            try:
                written: Any = asyncio.run(template.write(given, chars_cut=10**6, **more))
            except RequestError as error:
                written = error.message
            assert written == expected


@pytest.mark.parametrize("path", [*sorted(TEMPLATES.glob("*.jinja")), EMBEDDED], ids=lambda path: path.stem)
def test_a_published_template_writes_the_same_prompts_in_the_sandbox(path: Path) -> None:
    source, written = path.read_text("utf-8"), 0
    plain = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    ways: list[dict[str, Any]] = [{}, {"add_generation_prompt": False}, {"continue_final_message": True}]
    with sandbox(source, seconds=5.0) as template, asyncio.Runner() as runner:
        for given, tools, more in itertools.product(CONVERSATIONS, ([], TOOLS), ways):
            messages = msgspec.convert(given, list[ChatMessage])
            job: dict[str, Any] = {
                "chars_cut": 10**6,
                "tools": tools,
                **more,
                "variables": {"tools": tools} if tools else {},
            }
            try:
                expected = chat_prompt(plain, messages, **job)
            except RequestError as error:
                with pytest.raises(RequestError, match=re.escape(error.message)):
                    runner.run(template.write(messages, **job))
                continue
            written += 1
            assert runner.run(template.write(messages, **job)) == expected
    assert written >= 12, written


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("loop", "more than 1 s .*limits.template_seconds"),
        ("many", "more than 1000000 characters"),
        ("huge", "MemoryError|ended its process"),
    ],
)
def test_a_rendering_beyond_a_limit_is_a_clear_error_and_the_next_one_works(content: str, words: str) -> None:
    with sandbox(SWITCH) as template:
        with pytest.raises(RequestError, match=words):
            write(template, content)
        assert write(template, "hi").text == "<user>hi</><assistant>"


@pytest.mark.parametrize(
    "source",
    ["{{ 10 ** (10 ** 9) }}", "{{ 'x' * (10 ** 10) }}", "{% if %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"],
)
def test_a_template_that_cannot_be_compiled_is_a_clear_error_in_time(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.text.template_sandbox._START_WITHIN_S", 1.0)
    began_s = time.monotonic()
    with contextlib.suppress(CheckpointError, RequestError), sandbox(source) as template:
        write(template, "hi")
    assert time.monotonic() - began_s < 30


def test_a_slow_conversation_does_not_hold_up_a_small_one() -> None:
    async def both(template: TemplateSandbox) -> None:
        slow = asyncio.ensure_future(template.write(turns("loop", "x" * 400_000), chars_cut=10**6))
        await asyncio.sleep(0.5)
        await template.write(turns("hi"), chars_cut=10**6)
        assert not slow.done()
        with pytest.raises(RequestError, match=r"limits\.template_seconds"):
            await slow

    with sandbox(SWITCH, seconds=2.0) as template:
        asyncio.run(both(template))


@pytest.mark.parametrize("patience_s", [0.0, 30.0])
def test_the_answer_is_the_same_whether_the_loop_waits_for_it_or_yields(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.text.workers._PATIENCE_S", patience_s)

    async def beside(template: TemplateSandbox) -> tuple[list[str], bool]:
        worker = template._lanes[0]._workers[0]
        assert worker is not None
        others: list[None] = []
        if patience_s == 0.0:  # else an answer may be there at once; another task of the loop lets it come
            os.kill(worker._process.pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_soon(os.kill, worker._process.pid, signal.SIGCONT)
        asyncio.get_running_loop().call_soon(others.append, None)
        first = await template.write(turns("one"), chars_cut=10**6)
        yielded = bool(others)
        more = await asyncio.gather(*(template.write(turns(str(at)), chars_cut=10**6) for at in range(5)))
        return [first.text, *(one.text for one in more)], yielded

    with sandbox(PLAIN) as template:
        texts, yielded = asyncio.run(beside(template))
    assert texts == [f"<user>{said}</><assistant>" for said in ("one", *"01234")]
    assert yielded is (patience_s == 0.0), "only a loop that yields runs others meanwhile"


def test_odd_messages_are_refused_and_leave_the_worker_alive() -> None:
    nested: Any = "x"
    for _ in range(100_000):
        nested = [nested]
    with sandbox(PLAIN) as template:
        for content in ([{"type": "image_url"}], "\ud800"):
            with pytest.raises(RequestError):
                write(template, content)
        with pytest.raises(RequestError, match="nested too deeply"):
            write(template, "hi", variables={"deep": nested})
        calls = [{"function": {"name": "f", "arguments": "[" * 100_000}}]
        with pytest.raises(RequestError, match="nested too deeply"):
            asyncio.run(template.write([ChatMessage(role="assistant", tool_calls=calls)], chars_cut=100))
        assert write(template, "hi", variables={"big": 10**400}).text


def test_the_syntax_of_a_file_is_checked_without_folding_its_constants() -> None:
    check_syntax("{{ 10 ** (10 ** 9) }}", "f")
    with pytest.raises(ConfigError, match="f, line 1"):
        check_syntax("{% if %}", "f")
