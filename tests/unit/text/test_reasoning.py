"""Reasoning told apart from content: every way to cut the text gives the same, and nothing is lost."""

from __future__ import annotations

import random

import pytest

from weft.errors import ConfigError
from weft.text.reasoning import FORMATS, ReasoningSplitter, begins_inside, reasoning_format

THINK = FORMATS[0]


def split(pieces: list[str], *, inside: bool = False, row: object = THINK) -> tuple[str, str]:
    splitter = ReasoningSplitter(row, inside=inside)  # type: ignore[arg-type]
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


CASES = [
    ("<think>\nbecause 1 < 2\n\nso\n</think>\n\nYes.\n", False, "because 1 < 2\n\nso", "Yes.\n"),
    ("\n <think>x</think>y", False, "x", "y"),
    ("because\n</think>\nYes.", True, "because", "Yes."),
    ("<think>because</think>Yes.", True, "because", "Yes."),
    ("no markers at all\n", False, "", "no markers at all\n"),
    ("say <think> is a tag</think>", False, "", "say <think> is a tag</think>"),
    ("<thin air> and </thi", False, "", "<thin air> and </thi"),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("never closed", True, "never closed", ""),
    ("<think></think>Yes", False, "", "Yes"),
    ("<think>a</think>b</think>c<think>d", False, "a", "b</think>c<think>d"),
    ("\n\n", True, "", ""),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), CASES)
def test_reasoning_and_content_come_apart_however_the_text_is_cut(
    text: str, inside: bool, reasoning: str, content: str
) -> None:
    assert split([text], inside=inside) == (reasoning, content)
    assert split(list(text), inside=inside) == (reasoning, content)
    rng = random.Random(1)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, inside=inside) == (reasoning, content)


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_every_format_is_told_apart(row: object) -> None:
    text = f"{row.start}\nwhy\n{row.end}\nthat"  # type: ignore[attr-defined]
    assert split(list(text), row=row) == ("why", "that")


def test_text_that_cannot_be_a_marker_is_not_held_back() -> None:
    splitter = ReasoningSplitter(THINK, inside=True)
    assert splitter.push("a </").reasoning == "a "
    assert splitter.push("b").reasoning == "</b"
    assert splitter.push("</think>c").content == "c"


def test_a_splitter_knows_where_it_is() -> None:
    splitter = ReasoningSplitter(THINK, inside=False)
    assert not splitter.inside
    splitter.push("<think>")
    assert splitter.inside
    splitter.push("x</think>")
    assert not splitter.inside
    assert ReasoningSplitter(THINK, inside=True).inside


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", None, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, False),
        ("user: what is <think>?\nassistant:", None, False),
        ("...<think>half", "<think>half", True),
        ("...<think>x</think>half", "<think>x</think>half", False),
    ],
)
def test_the_prompt_says_whether_an_answer_begins_inside(prompt: str, continued: str | None, inside: bool) -> None:
    assert begins_inside(THINK, prompt, continued) is inside


def test_the_format_is_chosen_by_name_template_or_vocabulary() -> None:
    def chosen(name: str, template: str = "", *tokens: str) -> str | None:
        row = reasoning_format(name, template, tokens.__contains__)
        return row and row.name

    assert chosen("auto", "{{ x }}<think>\n") == "think"
    assert chosen("auto", "{% if '[/THINK]' in x %}") == "mistral"
    assert chosen("auto", "plain", "<think>", "</think>") == "think"
    assert chosen("auto", "plain", "<think>") is None
    assert chosen("auto", "plain") is None
    assert chosen("none", "<think>") is None
    assert chosen("deepseek_r1", "") == "deepseek_r1"
    with pytest.raises(ConfigError, match=r"--reasoning-parser 'x'.*auto, none, think.*granite"):
        chosen("x")
