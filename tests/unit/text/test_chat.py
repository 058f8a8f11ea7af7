"""Chat templates: what a template gets, what it may do, and what a request may ask of it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.errors import CheckpointError, ConfigError, RequestError
from weft.text.chat import ChatMessage, ChatTemplate, TemplateEnvironment, load_chat_template

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turns(*messages: dict[str, Any]) -> list[ChatMessage]:
    return msgspec.convert(list(messages), list[ChatMessage])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def render(source: str, *messages: dict[str, Any], **more: Any) -> str:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(turns(*messages), **more)


def test_a_conversation_ends_where_the_answer_begins() -> None:
    assert render(PLAIN, user("hi")) == "<user>hi</><assistant>"
    assert render(PLAIN, user("hi"), add_generation_prompt=False) == "<user>hi</>"


def test_the_last_message_is_continued_exactly_where_it_ends() -> None:
    for text in ("so far", "so far ", "", "with <marks> 🏔"):
        answer = {"role": "assistant", "content": text}
        continued = render(PLAIN, user("hi"), answer, continue_final_message=True)
        assert continued == f"<user>hi</><assistant>{text}"


def test_a_template_that_trims_does_not_trim_what_is_continued() -> None:
    source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    answer = {"role": "assistant", "content": "b "}
    assert render(source, user("a "), answer, continue_final_message=True) == "[a][b "


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="does not render the content"):
        render("{{ messages[0].role }}", user("hi"), continue_final_message=True)


def test_continuing_and_starting_an_answer_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render(PLAIN, user("hi"), continue_final_message=True, add_generation_prompt=True)


def test_text_parts_are_joined_and_others_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    assert render(PLAIN, user(parts)) == "<user>a\nb\nc</><assistant>"
    with pytest.raises(RequestError, match="'image_url'") as caught:
        render(PLAIN, user("x"), user([{"type": "text", "text": "a"}, {"type": "image_url"}]))
    assert caught.value.param == "messages[1].content[1]"


def test_a_developer_is_a_system_unless_the_template_knows_better() -> None:
    message = {"role": "developer", "content": "x"}
    assert render(PLAIN, message).startswith("<system>")
    assert render(PLAIN + "{# developer #}", message).startswith("<developer>")


def test_both_names_of_reasoning_reach_the_template() -> None:
    source = "{{ messages[0].reasoning_content }}/{{ messages[0].reasoning }}"
    for name in ("reasoning", "reasoning_content"):
        assert render(source, {"role": "assistant", "content": "x", name: "why"}) == "why/why"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "17 is odd", "signature": ""},
        {"type": "thinking", "thinking": [{"type": "text", "text": "17 is odd"}]},
        {"type": "reasoning", "text": "17 is odd"},
    ],
)
def test_reasoning_in_the_parts_of_a_past_answer_is_reasoning(part: dict[str, Any]) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}/{{ m.content }}{% endfor %}"
    parts = [part, {"type": "redacted_thinking", "data": "AAAA"}, {"type": "text", "text": "Yes."}]
    written = render(source, user("Is 17 odd?"), {"role": "assistant", "content": parts})
    assert written == "<user>/Is 17 odd?<assistant>17 is odd/Yes."
    with pytest.raises(RequestError, match=f"has type '{part['type']}'"):
        render(source, user(parts))


def test_arguments_of_past_tool_calls_are_objects_to_the_template() -> None:
    source = (
        "{% for key, value in messages[0].tool_calls[0].function.arguments.items() %}{{ key }}={{ value }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": 1})}}
    assert render(source, {"role": "assistant", "content": None, "tool_calls": [call]}) == "x=1"


def test_what_templates_of_the_field_use_is_there() -> None:
    source = (
        "{{ bos_token }}{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}inside{% endgeneration %}{{ {'a': 'é<'} | tojson }}"
        "{{ strftime_now('%Y') }}{{ extra }}"
    )
    template = ChatTemplate(
        source,
        special_tokens={"bos_token": "<s>"},
        environment=TemplateEnvironment(lambda: datetime.datetime(2031, 2, 3)),
    )
    assert template.render(turns(user("x")), variables={"extra": "!"}) == '<s>01inside{"a": "é<"}2031!'
    assert "extra" in template.variables


def test_block_lines_leave_no_space_behind() -> None:
    source = "{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n"
    assert render(source, user("a")) == "x\n"


def test_what_the_template_refuses_is_the_requests_error_in_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", user("a"))
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="failed on these messages"):
        render("{{ messages[0].content + 1 }}", user("a"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_reach_into_python(source: str) -> None:
    with pytest.raises(RequestError):
        render(source, user("a"))


def test_a_broken_template_names_its_place() -> None:
    with pytest.raises(ConfigError, match="my file, line 2"):
        ChatTemplate("\n{% if %}", special_tokens={}, origin="my file")


def test_messages_with_unknown_roles_are_refused() -> None:
    with pytest.raises(RequestError, match="'king'"):
        render(PLAIN, {"role": "king", "content": "x"})
    with pytest.raises(RequestError, match="empty"):
        render(PLAIN)


def test_fields_with_names_of_their_own_cannot_be_overridden() -> None:
    for name in ("messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(RequestError, match=name):
            render(PLAIN, user("x"), variables={name: "y"})


def test_the_template_is_found_by_precedence(tmp_path: Path) -> None:
    def found(override: str | None = None) -> str | None:
        template = load_chat_template(tmp_path, special_tokens={}, override=override)
        return template and template.render(turns(user("x")))

    assert found() is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "listed"}]})
    )
    assert found() == "listed"
    config.write_text(json.dumps({"chat_template": "config"}))
    assert found() == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert found() == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert found(str(tmp_path / "mine.jinja")) == "mine"
    with pytest.raises(ConfigError, match="--chat-template"):
        found(str(tmp_path / "absent.jinja"))
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        found()


SYSTEM = {"role": "system", "content": "You are kind."}
BOT = {"role": "assistant", "content": "hello"}


def ends(source: str, *messages: dict[str, Any], **more: Any) -> list[str]:
    """The conversation up to each of its boundaries."""
    template = ChatTemplate(source, special_tokens={})
    text = template.render(turns(*messages), **more)
    variables = more.get("variables")
    return [text[:at] for at in template.boundaries(turns(*messages), text, variables=variables)]


def test_boundaries_are_where_the_system_prompt_and_each_message_end() -> None:
    system = "<system>You are kind.</>"
    assert ends(PLAIN, SYSTEM, user("hi"), BOT, user("so?")) == [
        f"{system}<user>",
        f"{system}<user>hi</>",
        f"{system}<user>hi</><assistant>hello</>",
    ]
    assert ends(PLAIN, user("hi")) == ["<user>"]


def test_what_a_template_writes_before_any_message_is_a_boundary() -> None:
    source = "[tools: {{ tools }}]" + PLAIN
    assert ends(source, user("hi"), variables={"tools": "clock"}) == ["[tools: clock]<user>"]


def test_a_message_that_is_written_differently_when_others_follow_has_no_boundary() -> None:
    source = "{% for m in messages %}<{{ m.role }}{{ '!' if loop.last }}>{{ m.content }}</>{% endfor %}"
    assert ends(source, SYSTEM, user("a"), user("b"), user("c")) == ["<system>You are kind.</><user"]


def test_a_template_that_refuses_a_shorter_conversation_has_no_boundary_there() -> None:
    source = "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}" + PLAIN
    assert ends(source, user("a"), user("b"), user("c")) == []
    assert len(ends(source, user("a"), user("b"), user("c"), user("d"))) == 1


def test_a_long_conversation_has_boundaries_at_its_last_messages() -> None:
    found = ends(PLAIN, *[user(str(at)) for at in range(100)])
    assert [text.count("</>") for text in found] == [0, *range(92, 100)]
