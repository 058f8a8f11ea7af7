"""A model's way to speak, told from its template: formats, conversations with tools, and what is combined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.constrained import tokenizer, write
from weft.errors import RequestError
from weft.request import Grammar
from weft.text.chat import ChatMessage, ChatTemplate
from weft.text.chat_request import ConversationFields, read_chat
from weft.text.choices import showing
from weft.text.dialect import AnswerBlock, AnswerPlan, Dialect, text_of
from weft.text.grammars import choice_grammar, json_grammar
from weft.text.tools.definitions import ToolChoice, read_choice, read_tools

TEMPLATES = Path(__file__).resolve().parents[2] / "fixtures" / "family_templates"
TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "The weather.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Paris"]}, "days": {"enum": [3]}},
                    "required": ["city", "days"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "get_time"}},
    ]
)
ARGUMENTS = {"city": "Paris", "days": 3}
AUTO, REQUIRED = ToolChoice("auto"), ToolChoice("required")
ANSWER = choice_grammar(["sunny"], field="response_format")

FAMILIES: dict[str, tuple[str | None, str, bool]] = {
    # template: reasoning, tools, the prompt opens the reasoning
    "hermes_think": ("think", "hermes", False),
    "qwen_xml_think": ("think", "qwen3_xml", True),
    "lfm2": (None, "lfm2", False),
    "granite": (None, "hermes", False),
    "jamba": (None, "jamba", False),
    "nemotron": ("think", "nemotron", True),
    "llama3": (None, "llama3_json", False),
    "mistral": (None, "mistral", False),
    "minimax_m3": ("minimax_m3", "minimax_m3", False),
}
OPENINGS = (
    "]<]minimax[>[<tool_call>\n",
    "<tool_call>",
    "<|tool_call_start|>",
    "<TOOLCALL>",
    "<tool_calls>",
    "[TOOL_CALLS]",
    '{"name"',
)


def template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), special_tokens={})


def dialect(name: str, **parsers: str) -> Dialect:
    return Dialect(template(name), tokenizer(with_markers=False), **parsers)


def conversation(call_id: str) -> list[ChatMessage]:
    call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
    return [
        ChatMessage(role="user", content="What now?"),
        ChatMessage(role="assistant", content=None, tool_calls=[call]),
        ChatMessage(role="tool", content="sun", tool_call_id=call_id),
        ChatMessage(role="assistant", content="Sunny."),
        ChatMessage(role="user", content="Thanks."),
    ]


def blocks_of(plan: AnswerPlan, text: str) -> list[AnswerBlock]:
    reader = plan.reader(eager=False)
    reader.read(text, [], "stop")
    return reader.blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_formats_are_told_from_the_template(family: str) -> None:
    reasoning, tools, _ = FAMILIES[family]
    found = dialect(family)
    assert (found.reasoning and found.reasoning.name, found.tools and found.tools.name) == (reasoning, tools)
    assert found.template_takes_tools
    silent = dialect(family, reasoning_parser="none", tool_parser="none")
    assert (silent.reasoning, silent.tools) == (None, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_with_tools_is_rendered_as_its_family_wants(family: str) -> None:
    variables = {"tools": [tool.definition for tool in TOOLS]}
    turns = conversation("abcdefghi")
    text = template(family).render(turns, variables=variables)
    for words in ("get_time", "What now?", "Paris", "sun", "Sunny.", "Thanks."):
        assert words in text
    assert "get_time" not in template(family).render(turns)
    # What the family's own template writes for a past call is what its format reads.
    called = text[text.index("What now?") + 9 : text.rindex("sun")]
    reader = dialect(family).plan(text, tools=TOOLS, choice=AUTO).reader(eager=False)
    begin = called.index(next(mark for mark in OPENINGS if mark in called))
    prefix = "</think>" if FAMILIES[family][2] else ""
    reader.read(prefix + called[begin:], [], "stop")
    [call] = [block for block in reader.blocks if block.is_call]
    assert (call.name, json.loads(call.text)) == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_required_call_is_written_and_read_back_in_every_family(family: str) -> None:
    prompt = template(family).render(
        conversation("abcdefghi")[:1], variables={"tools": [tool.definition for tool in TOOLS]}
    )
    plan = dialect(family).plan(prompt, tools=TOOLS, choice=REQUIRED, several_calls=False)
    opened = FAMILIES[family][2]
    wish = "hm\n</think>\n\n" if opened else "<tool" if family == "hermes_think" else ""
    text = write(plan.grammar, 2, wish=wish, with_markers=False)
    blocks = blocks_of(plan, text or "")
    assert text_of(blocks, "reasoning") == ("hm" if opened else "")
    assert not text_of(blocks, "text").strip()
    assert len([block for block in blocks if block.is_call]) == 1


def test_thinking_that_is_switched_off_leaves_no_room_for_reasoning() -> None:
    for family in ("hermes_think", "qwen_xml_think", "nemotron"):
        text = template(family).render([ChatMessage(role="user", content="?")], variables={"enable_thinking": False})
        plan = dialect(family).plan(text, grammar=ANSWER)
        assert write(plan.grammar, 1, with_markers=False) == "sunny"
        [block] = blocks_of(plan, "sunny")
        assert (block.kind, block.text) == ("text", "sunny")


def test_a_model_that_thinks_is_constrained_behind_its_thoughts() -> None:
    opened = dialect("qwen_xml_think").plan("...<think>\n", grammar=ANSWER)
    text = write(opened.grammar, 1, wish="because\n</think>\n\n", with_markers=False)
    assert text == "because\n</think>\n\nsunny"
    free = dialect("hermes_think").plan("...assistant\n", grammar=ANSWER)
    text = write(free.grammar, 1, wish="<think>because</think>s", with_markers=False)
    assert text == "<think>because</think>sunny"
    assert write(free.grammar, 1, wish="s", with_markers=False) == "sunny"


def test_with_tools_and_a_schema_the_answer_is_either() -> None:
    plan = dialect("granite").plan("", tools=TOOLS, choice=AUTO, several_calls=False, grammar=ANSWER)
    assert write(plan.grammar, 1, wish="s", with_markers=False) == "sunny"
    text = write(plan.grammar, 1, wish="<t", with_markers=False)
    assert any(block.is_call for block in blocks_of(plan, text or ""))
    schema = json_grammar({"type": "object", "additionalProperties": False}, field="f")
    both = dialect("granite").plan("", tools=TOOLS, choice=AUTO, grammar=schema)
    assert json.loads(write(both.grammar, 1, wish="{", with_markers=False) or "") == {}
    with pytest.raises(RequestError, match="one or the other"):
        dialect("granite").plan("", tools=TOOLS, choice=REQUIRED, grammar=choice_grammar(["a"], field="guided_choice"))


def test_a_required_call_has_no_response_format() -> None:
    """instructor sends both in its mode RESPONSES_TOOLS."""
    without = dialect("granite").plan("", tools=TOOLS, choice=REQUIRED)
    assert dialect("granite").plan("", tools=TOOLS, choice=REQUIRED, grammar=ANSWER).grammar == without.grammar


def test_without_strict_tools_nothing_is_forced() -> None:
    assert dialect("granite").plan("", tools=TOOLS, choice=AUTO).grammar is None
    function = {**TOOLS[0].definition["function"], "strict": True}
    strict = read_tools([{"type": "function", "function": function}])
    grammar = dialect("granite").plan("", tools=strict, choice=AUTO).grammar
    assert isinstance(grammar, Grammar)


def test_tools_that_cannot_be_served_are_refused_with_what_to_do() -> None:
    deaf = Dialect(ChatTemplate("{{ messages }}", special_tokens={}), tokenizer())
    with pytest.raises(RequestError, match="--chat-template"):
        deaf.plan("", tools=TOOLS, choice=AUTO)
    for unknown in (
        Dialect(ChatTemplate("{{ tools }}", special_tokens={}), tokenizer(with_markers=False)),
        dialect("granite", tool_parser="none"),
    ):
        with pytest.raises(RequestError, match=r"--tool-parser and one of seed_oss, qwen3_xml, zaya, glm") as caught:
            unknown.plan("", tools=TOOLS, choice=AUTO)
        assert caught.value.param == "tools"
    assert deaf.plan("", tools=TOOLS, choice=ToolChoice("none")).grammar is None


def test_markers_that_are_special_tokens_stay_in_the_text_and_others_do_not() -> None:
    text = tokenizer()
    plan = Dialect(template("lfm2"), text).plan("", tools=TOOLS, choice=AUTO)
    call = "<|tool_call_start|>[get_time()]<|tool_call_end|>"
    decoded = showing(text, plan.shown_ids).decode(text.encode(f"<|end|>{call}<think>"))
    assert decoded == f"{call}<think>", "the vocabulary has reasoning markers, so they are read too"
    silent = Dialect(template("lfm2"), text, reasoning_parser="none")
    quiet = silent.plan("", tools=TOOLS, choice=AUTO)
    assert showing(text, quiet.shown_ids).decode(text.encode(f"<|end|>{call}<think>")) == call
    for hiding in (showing(text, frozenset()), text):
        assert hiding.decode(text.encode(call)) == "[get_time()]"


@pytest.mark.parametrize("with_markers", [True, False])
def test_reasoning_tokens_are_counted_up_to_the_end_marker(with_markers: bool) -> None:
    text = tokenizer(with_markers)
    plan = Dialect(template("hermes_think"), text).plan("")
    tokens = text.encode("<think>\nab\n</think>\n\ncd")
    expected = len(text.encode("<think>\nab\n</think>"))
    one_by_one, at_once = plan.reader(eager=True), plan.reader(eager=False)
    for token in tokens:
        one_by_one.read(text.decode([token], False), [token], None)
    assert one_by_one.reasoning_tokens == expected
    at_once.read(text.decode(tokens, False), tokens, "stop")
    assert at_once.reasoning_tokens == expected
    halved = plan.reader(eager=True)
    for part in (tokens[: expected - 1], tokens[expected - 1 :]):
        halved.read(text.decode(part, False), part, None)
    assert halved.reasoning_tokens == expected
    none = plan.reader(eager=False)
    none.read("just so", text.encode("just so"), "stop")
    assert none.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "allowed_tools"}, "mode is None"),
        ({"type": "allowed_tools", "mode": "none", "tools": [{"name": "a"}]}, "mode is 'none'"),
        ({"type": "allowed_tools", "allowed_tools": 3}, "mode is None"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, r"tool_choice\.tools is missing"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [3]}, r"tools\[0\]\.name is missing"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "z"}]}, "'z', which is not"),
    ],
)
def test_wrong_allowed_tools_are_named(choice: Any, words: str) -> None:
    tools = read_tools([{"type": "function", "function": {"name": name}} for name in "ab"])
    with pytest.raises(RequestError, match=words) as refused:
        read_choice(choice, tools)
    assert (refused.value.param or "").startswith("tool_choice")
    with pytest.raises(RequestError, match="tools is empty"):
        read_choice({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "a"}]}, ())


def test_allowed_tools_are_a_part_of_tools() -> None:
    tools = read_tools([{"type": "function", "function": {"name": name}} for name in "abc"])
    inner = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}, {"name": "c"}]}
    for choice in ({"type": "allowed_tools", "allowed_tools": inner}, {"type": "allowed_tools", **inner}):
        read = read_choice(choice, tools)
        assert (read.mode, [tool.name for tool in read.among(tools)]) == ("auto", ["b", "c"])
    assert [tool.name for tool in read_choice("required", tools).among(tools)] == ["a", "b", "c"]
    for allowed, other in (("get_weather", "get_time"), ("get_time", "get_weather")):
        choice = ToolChoice("auto", allowed=frozenset({allowed}))
        grammar = dialect("granite").plan("", tools=TOOLS, choice=choice).grammar
        assert isinstance(grammar, Grammar)
        assert allowed in grammar.grammar
        assert other not in grammar.grammar


M3 = "]<]minimax[>["


def m3_prompt(enabled: bool | None) -> str:
    read = template("minimax_m3")
    variables = None if enabled is None else {"enable_thinking": enabled}
    fields = ConversationFields(messages=[ChatMessage(role="user", content="?")], variables=variables)
    request = read_chat(fields, template_variables=read.variables)
    return read.render(request.messages, variables=request.rendering["variables"])


def test_a_switch_of_reasoning_has_the_name_that_the_template_reads() -> None:
    for fields, wanted in (({"reasoning_effort": "none"}, False), ({"variables": {"enable_thinking": True}}, True)):
        asked = ConversationFields(messages=[ChatMessage(role="user", content="?")], **fields)
        shown = read_chat(asked, template_variables={"thinking"}).rendering["variables"]
        assert (shown["thinking"], shown["enable_thinking"], shown.get("thinking_mode")) == (wanted, wanted, None)


def test_an_answer_of_minimax_m3_may_begin_with_the_end_of_its_reasoning() -> None:
    m3 = Dialect(template("minimax_m3"), tokenizer())
    free, thinking, silent = map(m3_prompt, (None, True, False))
    assert thinking.endswith("<mm:think>")
    assert silent.endswith("</mm:think>")
    for text, said in (
        ("</mm:think>\nsunny", [("text", "sunny")]),
        ("<mm:think>hm</mm:think>sunny", [("reasoning", "hm"), ("text", "sunny")]),
        ("sunny</mm:think>", [("text", "sunny</mm:think>")]),
    ):
        reader = m3.plan(free).reader(eager=True)
        for at in range(len(text)):
            reader.read(text[at], [1], None)
        reader.read("", [], "stop")
        assert [(block.kind, block.text) for block in reader.blocks] == said
        assert (reader.reasoning_tokens > 0) == (said[0][0] == "reasoning")
    for prompt, texts in {
        free: ("sunny", "</mm:think>sunny", "<mm:think>hm</mm:think>\nsunny"),
        thinking: ("hm</mm:think>sunny",),
        silent: ("sunny",),
    }.items():
        grammar = m3.plan(prompt, grammar=ANSWER).grammar
        for text in texts:
            assert write(grammar, 1, wish=text) == text
    with pytest.raises(AssertionError, match="refused"):
        write(m3.plan(silent, grammar=ANSWER).grammar, 1, wish="</mm:think>")


def test_strict_calls_begin_with_the_token_that_only_calls_have() -> None:
    m3 = Dialect(template("minimax_m3"), tokenizer())
    strict = (replace(TOOLS[0], strict=True),)
    grammar = m3.plan(m3_prompt(False), tools=strict, choice=AUTO).grammar
    call = f'{M3}<invoke name="get_weather">{M3}<city>Paris{M3}</city>{M3}<days>3{M3}</days>{M3}</invoke>'
    for text in ("No call: <b> {x}", f"I look.{M3}<tool_call>\n{call}\n{M3}</tool_call>"):
        write(grammar, 1, wish=text, tokens_max=400)
    for wrong in (f"I look.{M3}<x", f'{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>Rome'):
        with pytest.raises(AssertionError, match="refused"):
            write(grammar, 1, wish=wrong)


class FramedTemplate:
    """A template that writes the markers of Kimi K3."""

    source = "'<|open|>' + tag, '<|close|>' + tag, '<|sep|>'"
    reads_tools = True


RESPONSE, CLOSED = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
CALL = (
    '<|open|>tools<|sep|><|open|>call tool="get_time" index="1"<|sep|><|open|>argument key="hour" type="number"<|sep|>7'
    '<|close|>argument<|sep|><|open|>argument key="zone" type="string"<|sep|>7<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)


@pytest.mark.parametrize("size", [1, 7, 500])
def test_content_in_a_frame_is_read_without_it_and_written_in_it(size: int) -> None:
    framed = Dialect(FramedTemplate(), tokenizer())
    parameters = {"type": "object", "properties": {"hour": {"type": "integer"}, "zone": {"type": "string"}}}
    tools = read_tools([{"type": "function", "function": {"name": "get_time", "parameters": parameters}}])
    end = "<|close|>message<|sep|>"
    thinking, silent = "<|open|>message<|sep|><|open|>think<|sep|>", f"<|open|>message<|sep|>{RESPONSE}"
    thought = "Hm.<|close|>think<|sep|>"

    def read(prompt: str, text: str) -> list[tuple[str, str]]:
        plan = framed.plan(prompt, tools=tools, choice=ToolChoice("auto"))
        assert plan.shown_ids >= {tokenizer().added_id(marker) for marker in ("<|open|>", "<|close|>", "<|sep|>")}
        reader = plan.reader(eager=True)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for number, piece in enumerate(pieces):
            reader.read(piece, tokenizer().encode(piece), "stop" if number == len(pieces) - 1 else None)
        return [(block.kind, block.text) for block in reader.blocks]

    called = ("call", '{"hour": 7, "zone": "7"}')
    assert read(thinking, f"{thought}{RESPONSE}Noon.{CLOSED}{CALL}{end}") == [
        ("reasoning", "Hm."), ("text", "Noon."), called]  # fmt: skip
    assert read(thinking, f"{thought}{RESPONSE}{CLOSED}{CALL}{end}") == [("reasoning", "Hm."), called]
    assert read(silent, f"<b> is bold.{CLOSED}{end}") == [("text", "<b> is bold.")]

    answer = choice_grammar(["noon"], field="response_format")
    for prompt, before in ((thinking, thought + RESPONSE), (silent, "")):
        required = framed.plan(prompt, tools=tools, choice=ToolChoice("required")).grammar
        chosen = framed.plan(prompt, grammar=answer).grammar
        either = framed.plan(prompt, tools=tools, choice=ToolChoice("auto"), grammar=answer).grammar
        for grammar, text in (
            (required, f"{CLOSED}{CALL}{end}"), (chosen, f"noon{CLOSED}{end}"),
            (either, f"{CLOSED}{CALL}{end}"), (either, f"noon{CLOSED}{end}"),
        ):  # fmt: skip
            assert grammar is not None
            whole = before + text
            assert write(grammar, 1, wish=whole, tokens_max=len(whole) + 1) == whole
    strict = replace(tools[0], strict=True)
    with pytest.raises(RequestError, match="begin with no marker of one token"):
        framed.plan(thinking, tools=(strict,), choice=ToolChoice("auto"))
