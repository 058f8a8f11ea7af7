"""Answers as models spoil them, from a seed: calls in the reasoning, markers twice or cut at any place,
broken JSON, text between calls. Each call is found, or is text by the rules of docs/chat.md."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fixtures.constrained import tokenizer
from weft.text.chat import ChatTemplate
from weft.text.dialect import AnswerBlock, AnswerPlan, Dialect, text_of
from weft.text.tools.definitions import ToolChoice, read_tools

TEMPLATES = Path(__file__).resolve().parents[2] / "fixtures" / "family_templates"
TOOLS = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "note": {"type": "string"}},
                },
            },
        }
        for name in ("get_weather", "get_time")
    ]
)
FAMILIES = ("hermes_think", "qwen_xml_think", "nemotron")
QWEN = ("<tool_call>", "</tool_call>")
OPEN_CLOSE = {"hermes_think": QWEN, "qwen_xml_think": QWEN, "nemotron": ("<TOOLCALL>", "</TOOLCALL>")}
BAD_ARGUMENTS = '{"name": "get_time", "arguments": {"city": oops}}'
BROKEN = {
    "hermes_think": ('{"name": 3}', '{"name": "get_time", "arguments": [1]}', '{"no": "name"}', BAD_ARGUMENTS),
    "qwen_xml_think": (
        "<function=get_time>stray",
        "<func=get_time></func>",
        "<function=get_time><parameter=x>1</parameter>stray",
    ),
    "nemotron": ("[3]", '[{"name": 3}]', f"[{BAD_ARGUMENTS}]"),
}
THOUGHTS = ("Hmm.", "The user asks.", "So 1 < 2 and", "maybe\nI look", "<b>so</b>", "it is </thin")
TEXTS = ("Sure.", "I look it up.", "Two < three.", "<i>done</i>", "One moment,\nplease")
Call = tuple[str, dict[str, str]]


@dataclass
class Answer:
    """An answer, and what it is to be read as; texts without whitespace. ``is_broken``: a call breaks off."""

    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    is_broken: bool = False


def plan_of(family: str) -> AnswerPlan:
    template = ChatTemplate((TEMPLATES / f"{family}.jinja").read_text(), special_tokens={})
    prompt = "...<think>\n" if family != "hermes_think" else "..."
    dialect = Dialect(template, tokenizer(with_markers=False))
    return dialect.plan(prompt, tools=TOOLS, choice=ToolChoice("auto"))


def written(family: str, call: Call) -> str:
    """Between the markers."""
    name, arguments = call
    if family == "qwen_xml_think":
        listed = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"\n<function={name}>\n{listed}</function>\n"
    text = json.dumps({"name": name, "arguments": arguments})
    return f"[{text}]" if family == "nemotron" else f"\n{text}\n"


def good(rng: random.Random, family: str) -> tuple[str, Call]:
    call = (
        rng.choice(("get_weather", "get_time")),
        {
            key: rng.choice(("Köln 🏔", 'a {b} "c"', "see <tool_cal", "two words"))
            for key in rng.sample(("city", "note"), rng.randrange(3))
        },
    )
    start, end = OPEN_CLOSE[family]
    inner = written(family, call)
    if rng.random() < 0.2:  # the markers twice
        return f"{start}{rng.choice(('', chr(10)))}{start}{inner}{end}{rng.choice(('', chr(10)))}{end}", call
    return f"{start}{inner}{end}", call


def broken(rng: random.Random, family: str) -> str:
    start, end = OPEN_CLOSE[family]
    return start + rng.choice((*BROKEN[family], "words", "")) + end


def answer(rng: random.Random, family: str) -> Answer:
    thoughts = [rng.choice(THOUGHTS) for _ in range(rng.randrange(3))]
    for _ in range(rng.randrange(2)):
        considered = rng.choice((good(rng, family)[0], broken(rng, family), OPEN_CLOSE[family][0] + " tags"))
        thoughts += [considered, "No, wait."]
    spoiled = Answer("<think>" if family == "hermes_think" else "", reasoning="".join(thoughts))
    spoiled.text += " ".join(thoughts)
    ending = rng.choice(("body", "body", "body", "unclosed", "closed", "silent"))
    if ending in ("unclosed", "closed"):
        for _ in range(rng.randrange(1, 4)):
            text, call = good(rng, family)
            spoiled.text += rng.choice(("", "\n", "\n\n ")) + text
            spoiled.calls.append(call)
        spoiled.text += rng.choice(("", "\n"))
    spoiled.text += "" if ending in ("unclosed", "silent") else "\n</think>\n\n"
    for _ in range(rng.randrange(6) if ending == "body" else 0):
        match rng.randrange(5):
            case 0 | 1:
                text, call = good(rng, family)
                spoiled.calls.append(call)
                spoiled.text += text
            case 2:
                text = broken(rng, family)
                spoiled.text += f"{text} and "
                spoiled.content += f"{text}and"
                spoiled.is_broken = True
            case _:
                text = rng.choice(TEXTS)
                spoiled.text += f" {text}\n"
                spoiled.content += text
    return spoiled


def read(plan: AnswerPlan, pieces: list[str], *, eager: bool) -> list[AnswerBlock]:
    """The blocks, which the events add up to."""
    reader = plan.reader(eager=eager)
    events = [
        event
        for at, piece in enumerate(pieces)
        for event in reader.read(piece, [], "stop" if at == len(pieces) - 1 else None)
    ]
    texts: list[str] = []
    for event in events:
        if event.phase == "start":
            assert event.block.index == len(texts)
            texts.append("")
        texts[-1] += event.delta
    assert [event.phase for event in events if event.phase != "delta"] == ["start", "stop"] * len(texts)
    assert texts == [block.text for block in reader.blocks]
    return reader.blocks


def cuts(rng: random.Random, text: str) -> list[list[str]]:
    found = [list(text) or [""]]
    for _ in range(6):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
        found.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return found


def plain(text: str) -> str:
    return "".join(text.split())


def shown(blocks: list[AnswerBlock]) -> list[tuple[str, str, str]]:
    return [(block.kind, block.name, block.text) for block in blocks]


@pytest.mark.parametrize("seed", range(200))
def test_a_spoiled_answer_is_read_by_the_rules_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    plan, spoiled = plan_of(family), answer(rng, family)
    whole = read(plan, [spoiled.text], eager=False)
    assert plain(text_of(whole, "reasoning")) == plain(spoiled.reasoning), spoiled.text
    assert plain(text_of(whole, "text")) == plain(spoiled.content), spoiled.text
    assert [(block.name, json.loads(block.text)) for block in whole if block.is_call] == spoiled.calls
    streamed = read(plan, [spoiled.text], eager=True)
    if not spoiled.is_broken:
        assert shown(streamed) == shown(whole)
    for pieces in cuts(rng, spoiled.text):
        assert shown(read(plan, pieces, eager=False)) == shown(whole), pieces
        assert shown(read(plan, pieces, eager=True)) == shown(streamed), pieces
