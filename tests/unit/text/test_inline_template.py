"""Harmless templates in the server's own process: the worker's prompts, and no work without end."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.test_tools import TEMPLATES
from tests.unit.text.test_template_sandbox import PLAIN, SWITCH, sandbox, turns, write
from weft.errors import RequestError
from weft.text import inline_template
from weft.text.chat import ChatMessage, ChatTemplate, TemplateEnvironment
from weft.text.inline_template import InlineTemplate
from weft.text.template_check import is_harmless
from weft.text.template_worker import chat_prompt

ROOT = Path(__file__).resolve().parents[3]
EMBEDDED = ROOT / "src" / "weft" / "embedded" / "weft-recall" / "chat_template.jinja"
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "é🏔 <tag>"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a"},
     {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nb"}, {"role": "user", "content": "c"}],
    [{"role": "user", "content": "w?"}, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
     {"role": "tool", "content": "rain", "tool_call_id": "c1"}, {"role": "tool", "content": "{\"t\": 3}"}],
    [{"role": "user", "content": "w?"},
     {"role": "assistant", "content": "so", "reasoning": "hm", "tool_calls": [CALL]}],
    [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]]
LOOPS = ("{% for a in messages %}" * 8) + "x" + "{% endfor %}" * 8


def harmless(source: str) -> bool:
    return is_harmless(TemplateEnvironment().parse(source), source)


def inline(source: str) -> InlineTemplate:
    return InlineTemplate(source, special_tokens={"bos_token": "<s>"}, origin="its template")


@pytest.mark.parametrize("path", [*sorted(TEMPLATES.glob("*.jinja")), EMBEDDED], ids=lambda path: path.stem)
def test_a_published_template_writes_the_same_prompts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_template, "BUDGET_S", 5.0)  # a slow machine is not the subject
    source = path.read_text("utf-8")
    assert harmless(source) == (path.stem != "granite")  # it writes a list of calls in a loop
    fast, plain = inline(source), ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    written = 0
    ways: list[dict[str, Any]] = [{}, {"add_generation_prompt": False}, {"continue_final_message": True}]
    for given, tools, more in itertools.product(CONVERSATIONS, ([], TOOLS), ways):
        messages = msgspec.convert(given, list[ChatMessage])
        job: dict[str, Any] = {"chars_cut": 10**6, "tools": tools, **more,
                               "variables": {"tools": tools} if tools else {}}
        prompt = fast.write(messages, **job)
        try:
            expected = chat_prompt(plain, messages, **job)
        except RequestError:
            assert prompt is None
            continue
        if prompt is not None:
            written += 1
            assert prompt == expected
    assert written >= 12, written


@pytest.mark.parametrize("source", [
    "{{ 10 ** 9 }}", "{{ 'x'.format(1) }}", "{{ 'x'.center(10**9) }}", "{{ m.__class__ }}", "{{ f() }}",
    "{{ m.f() }}",
    "{{ [m] }}", "{{ {'a': m} }}", "{% set l = [l, l] %}", "{% include 'x' %}", "{% import 'x' as y %}",
    "{% for a in m recursive %}{{ loop(a) }}{% endfor %}", "{{ 'x' | center(99) }}", "{{ 'x' | indent(99) }}",
    "{{ m | replace('a', m) }}", "{{ m.replace('a', m) }}", "{{ m.replace('a', '" + "b" * 99 + "') }}",
    "{{ m | map('replace', 'a', 'bbb') }}", "{{ m | map(attribute=m) }}", "{{ m | join(m) }}",
    "{{ m | join('" + "-" * 99 + "') }}", "{{ m | tojson(indent=99) }}", "{{ m | tojson(indent=m) }}",
    "{{ strftime_now('%999999999d') }}", "{{ strftime_now(m) }}", "{{ 1000000000000 }}", "{{ m is odd }}",
    "{{ m is divisibleby 3 }}", "{% macro f() %}{% endmacro %}{% set f = 'x'.format %}{{ f() }}",
    "{% macro range() %}{% endmacro %}", "{% for range in m %}{% endfor %}", "{{ 'x'['upper']() }}",
    "{% call f() %}{% endcall %}", "{% filter upper %}{% endfilter %}", "{{ m(*m) }}", "{{ dict(a=1) }}",
    "{{ " + "-" * 90 + "1 }}", "{{ m }}" * 5000, "x" * 70_000])
def test_an_operation_outside_of_the_whitelist_is_for_the_worker(source: str) -> None:
    assert not harmless(source)
    assert harmless(PLAIN)


@pytest.mark.parametrize("source", [
    LOOPS,
    "{% for a in range(999) %}" * 3 + "{% endfor %}" * 3,
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}"
    "{% for a in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='ab') %}"
    "{% for a in range(60) %}{% set n.x = f(n.x) %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% set n = namespace(x=messages) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ messages[0].content * 100000000 }}", "{{ messages[0].content % 3 }}", "{{ n * n }}", "{{ messages }}",
    "{% for a in range(900) %}" + "y" * 9000 + "{% endfor %}", "{{ range(99999) | list | length }}",
    "{% for a in range(900) %}{% for b in range(900) if b > a %}{% endfor %}{% endfor %}",
    "{% set n = namespace(p=1) %}{% for a in range(60) %}{% set n.p = namespace(a=n.p, b=n.p) %}{% endfor %}"
    "{{ n.p | string }}",
    "{% for a in range(900) %}{{ range(900) | map('string') | join }}{% endfor %}",
    "{% for a in range(900) %}{{ messages | tojson }}{% endfor %}"])
def test_a_rendering_without_end_is_given_up_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert harmless(source), source
    template = inline(source + PLAIN)
    messages = turns(*"x" * 300)
    began_s = time.thread_time()
    assert template.write(messages, chars_cut=10**6, variables={"n": 10**400}) is None
    assert time.thread_time() - began_s < 0.25
    # The control: the same without the loop is written here. (The machine may stand still meanwhile.)
    monkeypatch.setattr(inline_template, "BUDGET_S", 5.0)
    assert inline(PLAIN).write(messages[:3], chars_cut=10**6) is not None


def test_what_is_given_up_here_is_written_or_refused_by_the_worker() -> None:
    source = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}" + PLAIN
    with sandbox(source) as template:
        assert template._inline is not None
        assert write(template, "hi").text == "<user>hi</><assistant>"
        assert len(write(template, *["x"] * 400).text) > 4000
        with pytest.raises(RequestError, match=r"more than (1 s .*limits\.template_s|1000000 characters)"):
            write(template, "loop", *"x" * 99)
        assert write(template, "hi").text == "<user>hi</><assistant>"
        for content in ([{"type": "image_url"}], "\ud800"):
            with pytest.raises(RequestError):
                write(template, content)
    with sandbox(SWITCH) as template:
        assert template._inline is None  # it has 10 ** 9


def test_after_one_that_spends_the_budget_some_go_to_the_worker_at_once(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline_template, "BUDGET_S", 5.0)
    template = inline("{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}" + PLAIN)
    assert template.write(turns("hi"), chars_cut=100) is not None
    assert template.write(turns("loop", *"x" * 50), chars_cut=100) is None
    answers = [template.write(turns("hi"), chars_cut=100) for _ in range(inline_template.PAUSE + 1)]
    assert [answer is None for answer in answers] == [True] * inline_template.PAUSE + [False]
