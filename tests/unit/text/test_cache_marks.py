"""Where ``cache_control`` stands in a rendered conversation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weft.errors import RequestError
from weft.text.chat import ChatMessage, ChatTemplate
from weft.text.template_worker import CACHE_CONTROLS_MAX, marked_characters, without_marks

HERE = {"type": "ephemeral"}
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }};{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def marked(*messages: dict[str, Any], tools: list[Any] | None = None, source: str = TEMPLATE) -> list[str]:
    """The prompt up to each mark."""
    template = ChatTemplate(source, special_tokens={})
    turns = msgspec.convert(list(messages), list[ChatMessage])
    variables = {"tools": without_marks(tools)} if tools else {}
    text = template.render(turns, variables=variables)
    assert "cache_control" not in text
    return [text[:at] for at in marked_characters(template, turns, text, variables=variables, tools=tools or ())]


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def test_a_marked_message_ends_behind_what_the_template_writes_after_it() -> None:
    system = {"role": "system", "content": "be brief", "cache_control": HERE}
    assert marked(system, {"role": "user", "content": "hi"}) == ["<system>be brief</>"]
    last = {"role": "user", "content": "hi ", "cache_control": HERE}
    assert marked({"role": "system", "content": "x"}, last) == ["<system>x</><user>hi</>"]


def test_a_marked_part_ends_behind_its_text() -> None:
    content = [part("the handbook", cache_control=HERE), part("today is Monday")]
    found = marked({"role": "system", "content": content}, {"role": "user", "content": "hi"})
    assert found == ["<system>the handbook"]
    both = [part("one", cache_control=HERE), "two", part("three", cache_control=HERE)]
    assert marked({"role": "user", "content": both}) == ["<user>one", "<user>one\ntwo\nthree"]


def test_a_marked_tool_ends_before_the_next_one_and_the_last_one_before_what_follows() -> None:
    first, second = ({"type": "function", "function": {"name": name}} for name in ("add", "mul"))
    hi = {"role": "user", "content": "hi"}
    text = '<tools>{"type": "function", "function": {"name": "'
    assert marked(hi, tools=[{**first, "cache_control": HERE}, second]) == [
        text + 'add"}};{"type": "function", "function": {"name": "'
    ]
    [behind_last] = marked(hi, tools=[first, {**second, "cache_control": HERE}])
    assert behind_last.endswith('"mul"}};')


def test_no_mark_is_found_where_none_was_set() -> None:
    assert marked({"role": "user", "content": [part("a"), part("b", cache_control=None)]}) == []
    assert marked({"role": "user", "content": "a", "cache_control": None}, tools=[{"type": "function"}]) == []


def test_a_message_that_is_written_otherwise_when_it_is_last_is_marked_as_far_as_its_text() -> None:
    source = "{% for m in messages %}{{ 'LAST ' if loop.last }}{{ m.content }}.{% endfor %}"
    found = marked(
        {"role": "user", "content": "one", "cache_control": HERE}, {"role": "user", "content": "two"}, source=source
    )
    assert found == ["one"]


def test_a_template_that_drops_what_was_marked_has_no_mark() -> None:
    assert marked({"role": "user", "content": "a", "cache_control": HERE}, source="{{ '' }}") == []


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a", "cache_control": {"type": "forever"}}], "messages[0].cache_control"),
        (
            [{"role": "user", "content": [part("a"), part("b", cache_control="yes")]}],
            "messages[0].content[1].cache_control",
        ),
    ],
)
def test_a_mark_of_another_kind_is_refused_by_name(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError, match="ephemeral") as caught:
        marked(*messages)
    assert caught.value.param == param


def test_marks_are_bounded_and_the_error_says_what_takes_more() -> None:
    content = [part("a", cache_control=HERE)] * (CACHE_CONTROLS_MAX + 1)
    with pytest.raises(RequestError, match="9 places; the limit is 8") as caught:
        marked({"role": "user", "content": content})
    assert "cache_boundaries" in caught.value.message
    assert len(marked({"role": "user", "content": content[1:]})) == CACHE_CONTROLS_MAX
