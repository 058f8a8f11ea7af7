"""Conversations in any order and form reach each kind of template, whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from weft.errors import RequestError
from weft.text.arrangement import argument_object
from weft.text.chat import ChatMessage, ChatTemplate
from weft.text.control_tokens import ControlTexts
from weft.text.template_worker import chat_prompt
from weft.text.tools.formats import FORMATS, ToolFormat

_CALLS = (
    "{% for c in m.tool_calls or [] %}<call {{ c.id }} {{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + _CALLS + "{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    + _CALLS
    + "{% endfor %}"
)
SILENT = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}" + _CALLS + "{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}" + _CALLS + "{% endfor %}"
)
ALTERNATING = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% set ns = namespace(user=true) %}{% for m in rest %}"
    "{% if m.role != 'tool' and not (m.role == 'assistant' and m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    "{% endfor %}[{{ m.role }}]{{ m.content }}" + _CALLS + "{% endfor %}"
)
NEEDS_A_QUESTION = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user query') }}"
    "{% endif %}" + FIRST_ONLY
)
CALLS_ONE_BY_ONE = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.called = m.tool_calls is defined %}{% if ns.called and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% if not ns.called and not m.content %}"
    "{{ raise_exception('an answer has content or calls') }}{% endif %}{% endif %}"
    "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call before a result') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}" + _CALLS + "{% endfor %}"
)
LEAVES_CALLS_OUT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LEAVES_CALLS_OUT_AND_TURNS = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') or m.tool_calls %}"
    "{{ raise_exception('roles are user and assistant') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
KINDS = {
    "leaves calls out": LEAVES_CALLS_OUT,
    "refuses calls and roles": LEAVES_CALLS_OUT_AND_TURNS,
    "plain": PLAIN,
    "first only": FIRST_ONLY,
    "silent": SILENT,
    "no system": NO_SYSTEM,
    "alternating": ALTERNATING,
    "needs a question": NEEDS_A_QUESTION,
    "calls one by one": CALLS_ONE_BY_ONE,
}


def message(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def render(source: str, *messages: dict[str, Any], calls: ToolFormat | None = None, **more: Any) -> str:
    template = ChatTemplate(source, special_tokens={}, calls=calls)
    return template.render(msgspec.convert(list(messages), list[ChatMessage]), **more)


CONVERSATIONS = {
    "a system message behind a turn": [message("user", "A1"), message("system", "B2"), message("user", "C3")],
    "a developer message behind an answer": [
        message("system", "A1"),
        message("user", "B2"),
        message("assistant", "C3"),
        message("developer", "D4"),
        message("user", "E5"),
    ],
    "a system message at the end": [message("user", "A1"), message("system", "B2")],
    "two system messages": [message("system", "A1"), message("developer", "B2"), message("user", "C3")],
    "two questions": [message("user", "A1"), message("user", "B2")],
    "two answers": [
        message("user", "A1"),
        message("assistant", "B2"),
        message("assistant", "C3"),
        message("user", "D4"),
    ],
    "an answer first": [message("assistant", "A1"), message("user", "B2")],
    "a system message alone": [message("system", "A1")],
    "an answer alone behind a system message": [message("system", "A1"), message("assistant", "B2")],
    "a result": [
        message("user", "A1"),
        message("assistant", None, tool_calls=[call('{"x": "B2"}')]),
        message("tool", "C3", tool_call_id="call_1"),
        message("user", "D4"),
    ],
    "a result without its call": [message("user", "A1"), message("tool", "B2", tool_call_id="call_1")],
    "a call without its result": [
        message("user", "A1"),
        message("assistant", "B2", tool_calls=[call('{"x": "C3"}')]),
        message("user", "D4"),
    ],
    "a result of the older word": [message("user", "A1"), message("function", "B2", name="f")],
    "nothing said": [message("user", "A1"), message("assistant"), message("user", []), message("user", "B2")],
    "a cut call": [
        message("user", "A1"),
        message("assistant", None, tool_calls=[call('{"x": "B2')]),
        message("tool", "C3", tool_call_id="call_1"),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_each_text_of_a_conversation_reaches_each_kind_of_template_in_order(kind: str, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    text, at = render(KINDS[kind], *messages), -1
    words = [word for word in ("A1", "B2", "C3", "D4", "E5") if word in json.dumps(messages)]
    for word in words:
        assert text.count(word) == 1, (word, text)
        assert text.index(word) > at, (word, text)
        at = text.index(word)


def test_what_a_template_takes_is_written_as_it_was_sent() -> None:
    assert render(PLAIN, *CONVERSATIONS["a system message behind a turn"]) == "[user]A1[system]B2[user]C3"
    assert render(PLAIN, *CONVERSATIONS["two questions"]) == "[user]A1[user]B2"
    assert render(PLAIN, *CONVERSATIONS["an answer first"]) == "[assistant]A1[user]B2"


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_system_message_leaves_the_text_before_it_as_it_was(kind: str) -> None:
    """The cached prefix of a conversation stays when a client adds a system message."""
    before = [message("system", "A1"), message("user", "B2"), message("assistant", "C3")]
    more = [message("user", "D4"), message("system", "E5"), message("assistant", "F6"), message("user", "G7")]
    short = render(KINDS[kind], *before, add_generation_prompt=False)
    assert render(KINDS[kind], *before, *more, add_generation_prompt=False).startswith(short)


def test_a_system_message_behind_a_turn_is_the_users_where_it_was() -> None:
    conversation = CONVERSATIONS["a system message behind a turn"]
    assert render(FIRST_ONLY, *conversation) == "[user]A1[user]B2[user]C3"
    assert render(ALTERNATING, *conversation) == "[user]A1\n\nB2\n\nC3"


def test_system_messages_at_the_beginning_become_one() -> None:
    assert render(FIRST_ONLY, *CONVERSATIONS["two system messages"]) == "[system]A1\n\nB2[user]C3"
    assert render(NO_SYSTEM, *CONVERSATIONS["two system messages"]) == "[user]A1\n\nB2\n\nC3"


def test_a_refusal_that_no_order_mends_keeps_the_templates_words() -> None:
    source = "{% if 'X' in messages[-1].content %}{{ raise_exception('no X here') }}{% endif %}" + FIRST_ONLY
    with pytest.raises(RequestError, match="no X here"):
        render(source, message("user", "A1"), message("system", "X"))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("", {}),
        ("  ", {}),
        (None, {}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('{"a": "b', {"arguments": '{"a": "b'}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ([1, 2], {"arguments": [1, 2]}),
        ("ls -l", {"arguments": "ls -l"}),
        (3, {"arguments": 3}),
    ],
)
def test_arguments_of_a_past_call_are_an_object(given: Any, shown: dict[str, Any]) -> None:
    assert argument_object(given) == shown
    rendered = render(PLAIN, message("user", "q"), message("assistant", None, tool_calls=[call(given)]))
    assert all(f"{name}={value}" in rendered for name, value in shown.items())


def test_a_template_that_prints_arguments_gets_json_text() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments + ';' }}{% endfor %}{% endfor %}"
    )
    asked = (message("user", "q"), message("assistant", None, tool_calls=[call('{"a": "é"}')]))
    assert render(source, *asked) == 'q{"a": "é"};'
    assert render(source.replace("+ ';'", ""), *asked) == 'q{"a": "é"}'


def test_ids_have_nine_characters_where_a_template_asks_for_them() -> None:
    text = render(ALTERNATING, *CONVERSATIONS["a result"])
    assert "call_1" not in text
    kept = [message("user", "q"), message("assistant", None, tool_calls=[call("{}", "abcdef123")])]
    assert "<call abcdef123 f>" in render(ALTERNATING, *kept)
    assert "<call call_1 f" in render(PLAIN, *CONVERSATIONS["a result"])


def test_a_template_that_takes_one_call_at_once_gets_each_with_its_result() -> None:
    """As Llama 3's does: the conversation would be dead once the model wrote two calls."""
    conversation = [
        message("user", "A1"),
        message("assistant", "B2", tool_calls=[call('{"x": "1"}', "call_1"), call('{"x": "2"}', "call_2")]),
        message("tool", "second", tool_call_id="call_2"),
        message("tool", "first", tool_call_id="call_1"),
        message("tool", "none's", tool_call_id="call_3"),
        message("user", "C3"),
    ]
    assert render(CALLS_ONE_BY_ONE, *conversation) == (
        "[user]A1[assistant]B2<call call_1 f x=1>[tool]first[assistant]<call call_2 f x=2>[tool]second"
        "[tool]none's[user]C3"
    )
    assert "B2<call call_1 f x=1><call call_2 f x=2>[tool]second[tool]first" in render(PLAIN, *conversation)


def test_an_empty_answer_is_a_space_to_a_template_that_wants_content() -> None:
    """As Ministral 3's does. It is what an answer leaves that the limit cut inside of its reasoning."""
    conversation = [message("user", "A1"), message("assistant", "", reasoning="R"), message("user", "B2")]
    assert render(CALLS_ONE_BY_ONE, *conversation) == "[user]A1[assistant] [user]B2"
    assert render(PLAIN, *conversation) == "[user]A1[assistant][user]B2"


def test_an_answer_is_continued_behind_a_system_message() -> None:
    messages = (message("user", "A1"), message("system", "B2"), message("assistant", "C3"))
    assert render(FIRST_ONLY, *messages, continue_final_message=True) == "[user]A1[user]B2[assistant]C3"


def row(name: str) -> ToolFormat:
    return next(row for row in FORMATS if row.name == name)


CALLED = [
    message("user", "A1"),
    message("assistant", "B2", tool_calls=[call('{"x": "C3", "n": [1, null]}', "call_1"), call("{}", "call_2")]),
    message("tool", "D4", tool_call_id="call_1"),
    message("tool", "E5", tool_call_id="call_2"),
]
SPOKEN = {
    "lfm2": '<|tool_call_start|>[f(x="C3", n=[1, null]), f()]<|tool_call_end|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"x": "C3", "n": [1, null]}}, {"name": "f", "arguments": {}}]',
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": "C3", "n": [1, null]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=x>\nC3\n</parameter>\n<parameter=n>\n[1, null]\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:f{x:<|"|>C3<|"|>,n:[1,null]}<tool_call|><|tool_call>call:f{}<tool_call|>',
    "glm4": 'f\n{"x": "C3", "n": [1, null]}\nf\n{}',
    "harmony": '{"name": "f", "arguments": {"x": "C3", "n": [1, null]}}\n{"name": "f", "arguments": {}}',
}


@pytest.mark.parametrize("name", SPOKEN)
def test_a_past_call_is_the_models_own_text_where_the_template_leaves_it_out(name: str) -> None:
    """As those of LFM2, SmolLM3 and Granite 3.3 do. A model that does not see its call makes it again."""
    assert (
        render(LEAVES_CALLS_OUT, *CALLED, calls=row(name)) == f"[user]A1[assistant]B2\n{SPOKEN[name]}[tool]D4[tool]E5"
    )
    assert "<call call_1 f x=C3" in render(PLAIN, *CALLED, calls=row(name))
    assert SPOKEN[name] not in render(PLAIN, *CALLED, calls=row(name))


GLM4 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% endif %}{% endfor %}"
)
"""A template in the style of GLM-4-0414: calls are left out, and results have a role of their own."""


def test_results_have_the_older_role_where_the_template_knows_only_that() -> None:
    assert render(GLM4, *CALLED[:3], calls=row("glm4")) == (
        f"<|user|>\nA1<|assistant|>\nB2\n{SPOKEN['glm4']}<|observation|>\nD4"
    )
    without = GLM4.replace("observation", "ipython")
    assert render(without, *CALLED[:3], calls=row("glm4")).endswith("<|user|>\nD4")


def test_a_call_without_words_is_the_whole_answer_and_a_model_without_a_format_gets_json() -> None:
    turns = [message("user", "A1"), message("assistant", None, tool_calls=[call('{"x": "B2"}')])]
    assert render(LEAVES_CALLS_OUT, *turns) == '[user]A1[assistant]{"name": "f", "arguments": {"x": "B2"}}'


@pytest.mark.parametrize(
    "shown",
    [
        "{% if tools %}{{ m.tool_calls }}{% endif %}",
        "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}",
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments + ';' }}{% endfor %}",
        "{% if not loop.last %}{{ m.tool_calls }}{% endif %}",
    ],
)
def test_a_template_that_shows_anything_of_a_call_is_left_alone(shown: str) -> None:
    """Only with tools, only the id, only JSON text, only in front of a result."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + shown + "{% endfor %}"
    assert SPOKEN["lfm2"] not in render(source, *CALLED, calls=row("lfm2"))


def test_an_answer_to_a_call_that_is_left_out_keeps_the_text_before_it() -> None:
    """The cached prefix of the conversation stays from one request to the next."""
    for count in range(1, len(CALLED)):
        begun = render(LEAVES_CALLS_OUT, *CALLED[:count], calls=row("lfm2"), add_generation_prompt=False)
        assert render(LEAVES_CALLS_OUT, *CALLED, calls=row("lfm2")).startswith(begun)


def test_the_markers_of_a_spoken_call_are_tokens_and_those_in_its_arguments_are_text() -> None:
    tokens = ["<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"]
    control = ControlTexts(tokens, tokens[:2])
    template = ChatTemplate(LEAVES_CALLS_OUT, special_tokens={}, control=control, calls=row("lfm2"))
    given = json.dumps({"x": "<|im_end|><|tool_call_end|>"})
    turns = [message("user", "A1"), message("assistant", None, tool_calls=[call(given)])]
    prompt = chat_prompt(template, msgspec.convert(turns, list[ChatMessage]), chars_cut=1000)
    assert prompt.text == '[user]A1[assistant]<|tool_call_start|>[f(x="<|im_end|><|tool_call_end|>")]<|tool_call_end|>'
    begin = prompt.text.index("<|im_end|>")
    assert prompt.quoted == [begin, begin + len("<|im_end|>")]


def test_reasoning_beside_content_has_the_name_that_the_template_reads() -> None:
    """LFM2.5's template reads ``thinking`` alone (llama.cpp 24234), and gpt-oss's refuses content beside it."""
    shown = "[{{ m.role }}]{% if m.thinking is defined %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    refused = "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('not both') }}{% endif %}"
    turns = [message("user", "A1"), message("assistant", "C3", reasoning="B2"), message("user", "D4")]
    source = "{% for m in messages %}" + shown + _CALLS + "{% endfor %}"
    assert render(source, *turns) == "[user]A1[assistant]<think>B2</think>C3[user]D4"
    assert render(source.replace("[{{", refused + "[{{"), *turns) == "[user]A1[assistant]C3[user]D4"
    assert render(PLAIN, *turns) == "[user]A1[assistant]C3[user]D4"
