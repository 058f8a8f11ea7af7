"""Structural tags: what random tokens under them write has the form after each trigger, and is free before it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.fixtures.constrained import END, MARKERS, tokenizer, write
from weft.errors import RequestError
from weft.request import Grammar
from weft.text.grammar_fields import from_response_format, from_structured_outputs

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LEGACY = {
    "type": "structural_tag",
    "triggers": ["<function="],
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=time>", "schema": {"type": "null"}, "end": "</function>"},
    ],
}


def writes(made: Grammar, wish: str) -> bool:
    """Whether ``wish`` is a whole answer under ``made``. AssertionError where a token of it is refused."""
    return write(made, 1, wish=wish + END) == wish


def no_token(text: str) -> int | None:
    return None


def grammar(form: Any, token_of: Any = no_token) -> Grammar:
    return from_response_format({"type": "structural_tag", "format": form}, token_of)


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<function="],
    "tags": [
        {"begin": name, "content": {"type": "json_schema", "json_schema": schema}, "end": "</function>"}
        for name, schema in (("<function=weather>", CITY), ("<function=time>", {"type": "null"}))
    ],
}


@pytest.mark.parametrize(
    "value", [LEGACY, {"type": "structural_tag", "format": TRIGGERED}], ids=["structures", "format"]
)
def test_text_is_free_and_a_trigger_begins_a_form(value: dict[str, Any]) -> None:
    made = from_response_format(value, no_token)
    for wish in (
        "no call",
        'I look. <function=weather>{"city":"Rome"}</function>',
        '<function=time>null</function> and <function=weather>{"city":"Rome"}</function> done',
        "a < b, <func",
    ):
        assert writes(made, wish)
    for refused in ('<function=weather>{"city":"Oslo"}', "<function=other>", "<function=time>{", "x <function="):
        with pytest.raises(AssertionError, match="refused"):
            writes(made, refused)


@pytest.mark.parametrize("seed", range(6))
def test_at_least_one_and_no_more(seed: int) -> None:
    tag = {"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{1,3}"}, "end": ["</a>", "<end>"]}
    once = {
        "type": "triggered_tags",
        "triggers": ["<a>"],
        "tags": [tag],
        "at_least_one": True,
        "stop_after_first": True,
    }
    text = write(grammar({"type": "sequence", "elements": [{"type": "const_string", "value": "So: "}, {**once}]}), seed,
                 wish="So: a number <a>42<end>")  # fmt: skip
    assert text == "So: a number <a>42<end>"
    several = {"type": "tags_with_separator", "tags": [tag], "separator": ", ", "at_least_one": True}
    written = write(grammar(several), seed)
    assert written is not None
    assert re.fullmatch(r"<a>\d{1,3}(</a>|<end>)(, <a>\d{1,3}(</a>|<end>))*", written)


def test_alternatives_and_grammars_and_free_content() -> None:
    form = {
        "type": "or",
        "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {"type": "grammar", "grammar": 'start: "yes" | "no"'},
        ],
    }
    for wish in ("<think>a </thin b</think>", "yes", "no"):
        assert writes(grammar(form, tokenizer().added_id), wish)
    for refused in ("maybe", "<think>a</think>b"):
        with pytest.raises(AssertionError, match="refused"):
            writes(grammar(form, tokenizer().added_id), refused)


def test_a_trigger_that_is_a_token_is_that_token() -> None:
    marker = MARKERS[0]
    token = tokenizer().added_id(marker)
    assert token is not None
    null = {"type": "json_schema", "json_schema": {"type": "null"}}
    form = {
        "type": "triggered_tags",
        "triggers": [marker],
        "tags": [{"begin": f"{marker}go", "content": null, "end": ""}],
    }
    made = grammar(form, tokenizer().added_id)
    assert f"TEXT <[{token}]>" in json.loads(made.grammar)["grammars"][0]["lark_grammar"]


def test_structured_outputs_takes_the_same_as_an_object_or_its_text() -> None:
    for value in (LEGACY, json.dumps(LEGACY)):
        made = from_structured_outputs({"structural_tag": value}, no_token)
        assert made.field == "structured_outputs.structural_tag"
        assert writes(made, "<function=time>null</function>")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"structures": []}, "response_format.structures is missing: it takes a list"),
        ({"structures": [{"begin": "<a>", "end": ""}]}, "response_format.triggers is missing"),
        (
            {"structures": [{"begin": "b", "end": ""}], "triggers": ["<a"]},
            "tags[0].begin is 'b', which begins with none",
        ),
        ({"structures": [{"begin": "<a>"}], "triggers": ["<a"]}, "tags[0].end has to be a text"),
        (
            {"format": {"type": "qwen_xml_parameter"}},
            "response_format.format.type is 'qwen_xml_parameter'; it is one of",
        ),
        ({"format": {"type": "tag", "begin": "<a>", "end": "x"}}, "response_format.format.content is NoneType"),
        ({"format": {"type": "const_string", "value": 3}}, "response_format.format.value has to be a text"),
        ({"format": {"type": "sequence", "elements": [{"type": "regex"}]}}, "format.elements[0].pattern is missing"),
        ({"format": {"type": "json_schema", "json_schema": 3}}, "json_schema is int; a JSON schema is an object"),
    ],
)
def test_what_is_wrong_is_named(value: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        from_response_format({"type": "structural_tag", **value}, no_token)
    assert said in caught.value.message
    with pytest.raises(RequestError, match=r"structured_outputs.structural_tag is not JSON"):
        from_structured_outputs({"structural_tag": "{"}, no_token)
