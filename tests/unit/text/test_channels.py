"""Answers in channels (harmony): what each message is, however the text is cut, and what grammars allow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.constrained import END, allowed_tokens, compiler, tokenizer, write
from weft.errors import RequestError
from weft.text import channels
from weft.text.channels import FORMATS, open_header
from weft.text.chat import ChatMessage, ChatTemplate
from weft.text.dialect import AnswerPlan, Dialect
from weft.text.grammars import choice_grammar
from weft.text.tools.definitions import ToolChoice, read_tools
from weft.text.tools.json_calls import HELD_CHARS

TEMPLATE = ChatTemplate(
    (Path(__file__).resolve().parents[2] / "fixtures" / "family_templates" / "harmony.jinja").read_text(),
    special_tokens={},
)
TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Paris"]}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "get_time"}},
    ]
)
AUTO = ToolChoice("auto")
HARMONY, INKLING = FORMATS
PROMPT = TEMPLATE.render([ChatMessage(role="user", content="?")])
THOUGHT = "<|channel|>analysis<|message|>Paris, then.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
FINAL = "<|channel|>final<|message|>Sunny.<|return|>"


def dialect(**parsers: str) -> Dialect:
    return Dialect(TEMPLATE, tokenizer(with_markers=False), **parsers)


def plan(**settings: object) -> AnswerPlan:
    return dialect().plan(PROMPT, tools=TOOLS, choice=AUTO, **settings)  # type: ignore[arg-type]


def read(
    text: str, made: AnswerPlan | None = None, *, step: int = 1000, eager: bool = False, reason: str = "stop"
) -> list[tuple[str, str, str, bool]]:
    reader = (made or plan()).reader(eager=eager)
    for at in range(0, len(text), step):
        reader.read(text[at : at + step], [1], None)
    reader.read("", [], reason)
    return [(block.kind, block.name, block.text, block.is_complete) for block in reader.blocks]


CASES = {
    "thought and answer": (THOUGHT + FINAL, [("reasoning", "", "Paris, then.", True), ("text", "", "Sunny.", True)]),
    "thought and call": (
        THOUGHT + CALL + "<|call|>",
        [("reasoning", "", "Paris, then.", True), ("call", "get_weather", '{"city": "Paris"}', True)],
    ),
    "the end of a call that stops the answer": (CALL, [("call", "get_weather", '{"city": "Paris"}', True)]),
    "recipient before the channel": (
        " to=functions.get_time<|channel|>analysis json<|message|>{}<|call|>",
        [("call", "get_time", "{}", True)],
    ),
    "a word to the user before a call": (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
        [("text", "", "I look.", True), ("call", "get_weather", '{"city": "Paris"}', True)],
    ),
    "a forgotten end": (
        "<|channel|>analysis<|message|>Hm" + FINAL,
        [("reasoning", "", "Hm", True), ("text", "", "Sunny.", True)],
    ),
    "no header": ("Just text <|end of it", [("text", "", "Just text <|end of it", True)]),
    "half a header": ("<|channel|>fin", [("text", "", "<|channel|>fin", True)]),
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_what_a_message_is_does_not_depend_on_how_its_text_comes(name: str, step: int, eager: bool) -> None:
    text, blocks = CASES[name]
    assert read(text, step=step, eager=eager) == blocks


def test_arguments_that_are_no_object_are_text_and_cut_ones_are_not_complete() -> None:
    assert read(CALL[:-3] + "<|call|>") == [("text", "", '{"city": "Pari', True)]
    assert read(CALL[:-1], reason="length") == [("text", "", '{"city": "Paris"', False)]
    assert read(CALL[:-3], eager=True, reason="length") == [("text", "", '{"city": "Pari', False)]
    long = CALL[:-3] + "s" * HELD_CHARS
    [(kind, _, text, complete)] = read(long, eager=True, reason="length", step=9)
    assert (kind, text[:15], complete) == ("call", '{"city": "Paris', False)
    alone = dialect().plan(PROMPT)
    assert read(CALL, alone) == [("text", "", '{"city": "Paris"}', True)]
    several = CALL + "<|call|><|start|>assistant" + CALL
    assert len(read(several)) == 2
    assert len(read(several, plan(several_calls=False))) == 1


def test_reasoning_is_counted_in_tokens_and_may_be_left_out() -> None:
    text = tokenizer(with_markers=False)
    reader = plan().reader(eager=True, shows_reasoning=False)
    for token in text.encode(THOUGHT + FINAL):
        reader.read(text.decode([token], skip_special_tokens=False), [token], None)
    reader.read("", [], "stop")
    assert reader.reasoning_tokens == len(text.encode(THOUGHT.removesuffix("<|start|>assistant")))
    assert [block.kind for block in reader.blocks] == ["text"]
    whole = plan().reader(eager=True)
    whole.read(THOUGHT + FINAL, text.encode(THOUGHT + FINAL), "stop")
    assert whole.reasoning_tokens == reader.reasoning_tokens


def test_a_message_that_the_prompt_has_begun_goes_on() -> None:
    assert open_header(HARMONY, PROMPT) is None
    prompt = PROMPT + "<|channel|>analysis<|message|>First"
    assert open_header(HARMONY, prompt) == "assistant<|channel|>analysis<|message|>"
    blocks = read(", then.<|end|><|start|>assistant" + FINAL, dialect().plan(prompt))
    assert [block[0] for block in blocks] == ["reasoning", "text"]


def test_formats_are_told_from_the_template_and_can_be_named() -> None:
    found = dialect()
    assert found.reasoning is not None
    assert found.tools is not None
    assert (found.reasoning.name, found.tools.name) == ("harmony", "harmony")
    shown = dialect(reasoning_parser="none").plan(PROMPT)
    assert read(THOUGHT + FINAL, shown) == [("text", "", "Paris, then.Sunny.", True)]


def test_a_conversation_is_rendered_and_read_back() -> None:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": "Paris"})},
    }
    turns = [
        ChatMessage(role="user", content="Now?"),
        ChatMessage(role="assistant", content=None, reasoning="Hm.", tool_calls=[call]),
        ChatMessage(role="tool", content="sun", tool_call_id="a"),
    ]
    text = TEMPLATE.render(turns, variables={"tools": [tool.definition for tool in TOOLS]})
    past = text.partition("Now?<|end|><|start|>assistant")[2].partition("<|start|>functions")[0]
    assert [block[:2] for block in read(past)] == [("reasoning", ""), ("call", "get_weather")]


def may_end(made: AnswerPlan, text: str) -> bool:
    """Whether an answer of the grammar may be ``text``."""
    assert made.grammar is not None
    compiled, words = compiler(False).compile(made.grammar), tokenizer(with_markers=False)
    matcher = compiled.matcher()
    if not all(matcher.consume_token(token) for token in words.encode(text)):
        return False
    return words.added_id(END) in allowed_tokens(matcher, compiled.token_count)


def test_grammars_hold_behind_the_analysis(monkeypatch: pytest.MonkeyPatch) -> None:
    # The end of an answer is called <|end|> in the vocabulary of these tests.
    over = replace(HARMONY, ends=("<|over|>", *HARMONY.ends[1:]))
    monkeypatch.setattr(channels, "FORMATS", (over, INKLING))
    thought, final = THOUGHT.replace("<|end|>", "<|over|>"), "<|channel|>final<|message|>"
    required = dialect().plan(PROMPT, tools=TOOLS[:1], choice=ToolChoice("required"))
    text = write(required.grammar, 3, with_markers=False) or ""  # type: ignore[arg-type]
    [(kind, name, arguments, _)] = read(text, required)
    assert (kind, name, json.loads(arguments)) == ("call", "get_weather", {"city": "Paris"})
    assert may_end(required, thought + CALL)
    assert not may_end(required, thought + final + "sunny")
    answer = choice_grammar(["sunny"], field="response_format")
    structured = dialect().plan(PROMPT, grammar=answer)
    assert may_end(structured, final + "sunny")
    assert may_end(structured, thought + final + "sunny")
    assert not may_end(structured, thought + final + "cloudy")
    strict = plan(grammar=answer)
    assert may_end(strict, thought + CALL)
    assert may_end(strict, thought + final + "sunny")
    called = dialect().plan(PROMPT, tools=TOOLS[:1], choice=ToolChoice("required"), grammar=answer)
    assert called.grammar == required.grammar
    guided = choice_grammar(["sunny"], field="guided_choice")
    with pytest.raises(RequestError, match="cannot be combined"):
        dialect().plan(PROMPT, tools=TOOLS, choice=ToolChoice("required"), grammar=guided)


def test_strict_tools_leave_the_model_free_to_call_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    over = replace(HARMONY, ends=("<|over|>", *HARMONY.ends[1:]))
    monkeypatch.setattr(channels, "FORMATS", (over, INKLING))
    function = TOOLS[0].definition["function"]
    [tool] = read_tools([{"type": "function", "function": function | {"strict": True}}])
    made = dialect().plan(PROMPT, tools=[tool], choice=AUTO)
    thought = THOUGHT.replace("<|end|>", "<|over|>")
    assert may_end(made, thought + CALL)
    assert may_end(made, thought + "<|channel|>final<|message|>It is sunny.")
    assert dialect().plan(PROMPT, tools=TOOLS, choice=AUTO).grammar is None
