"""Grammars that weft writes: what random tokens under them make is always what was asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.fixtures.constrained import allowed_tokens, compiler, tokenizer, write
from weft.engine.grammars import GRAMMARS_MAX, GrammarCompiler
from weft.errors import RequestError
from weft.request import Grammar
from weft.text.grammars import behind_reasoning, choice_grammar, grammar_from, json_grammar, regex_grammar, text_grammar

SCHEMA = {
    "title": "Person",
    "type": "object",
    "additionalProperties": False,
    "$defs": {"colour": {"enum": ["red", "<think>", 'a "b"\n/']}},
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"$ref": "#/$defs/colour"}, "maxItems": 3},
        "ok": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "age", "likes", "ok"],
}


@pytest.mark.parametrize("seed", range(12))
def test_random_tokens_under_a_schema_are_json_that_is_valid(seed: int) -> None:
    text = write(json_grammar(SCHEMA, field="f"), seed)
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "names",
    [
        {"$id": "Output Format"},  # griptape
        {"$id": "Ärger"},
        {"$id": "x#y"},
        {"$schema": "https://example.com/schema", "$id": "::"},
        {"$schema": "https://json-schema.org/draft-07/schema#"},
        {"$defs": {"colour": {"$id": "a colour", **SCHEMA["$defs"]["colour"]}}},  # type: ignore[index]
    ],
)
def test_names_of_schemas_may_be_titles(names: dict[str, Any]) -> None:
    text = write(json_grammar({**SCHEMA, **names}, field="f"), 1)
    assert text == write(json_grammar(SCHEMA, field="f"), 1)


def test_names_that_references_use_stay_and_so_do_values() -> None:
    item = {"$id": "item", "type": "integer", "maximum": 9, "minimum": 9}
    named = {"$id": "http://x/list", "$defs": {"item": item}, "type": "array", "items": {"$ref": "item"}, "minItems": 1}
    assert write(json_grammar({**named, "maxItems": 1}, field="f"), 1, wish="[9]") == "[9]"
    anchor = {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "#a", "type": ["array", "null"]}
    assert write(json_grammar({**anchor, "items": {"$ref": "#a"}, "maxItems": 1}, field="f"), 1, wish="[null]")
    value = {"$id": "a b", "$schema": "c d"}
    assert json.loads(write(json_grammar({"const": value}, field="f"), 1) or "") == value
    draft = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 0, "maximum": 1}
    assert write(json_grammar({**draft, "exclusiveMinimum": True}, field="f"), 1) == "1", "the draft has a say"


def test_whitespace_is_bounded_and_can_be_forbidden() -> None:
    compact = write(json_grammar(SCHEMA, field="f", whitespace=None), 1)
    assert compact is not None
    assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", compact)), "whitespace outside of strings"
    for indented in (
        json.dumps({"name": "a", "age": 1, "likes": ["red"], "ok": None}, indent=indent)
        for indent in (None, 0, 4, 12, "\t")
    ):
        assert write(json_grammar(SCHEMA, field="f"), 1, wish=indented) == indented
    for refused in ("{  ", "{\n" + " " * 25, "{\n\n", " {"):
        with pytest.raises(AssertionError, match="refused"):
            write(json_grammar(SCHEMA, field="f"), 1, wish=refused)


@pytest.mark.parametrize("regex", [r"[a-c]{2}/\d\\(x|<think>)", "a\nb/?", r"\/{1,3}é"])
def test_random_tokens_under_a_regex_match_it(regex: str) -> None:
    for seed in range(4):
        text = write(regex_grammar(regex, field="f"), seed)
        assert text is not None
        assert re.fullmatch(regex, text)


def test_random_tokens_under_a_choice_are_one_of_it() -> None:
    choices = ["yes", "yes, but", "<think>", 'a "q"\n\\', "é🏔"]
    written = {write(choice_grammar(choices, field="f"), seed) for seed in range(40)}
    assert written == set(choices)


def test_lark_and_gbnf_are_both_taken() -> None:
    lark = 'start: item+\nitem: "x" | "(" start ")"\n'
    gbnf = 'root ::= "<" num ">"\nnum ::= [0-9]{1,3}\n'
    for seed in range(4):
        text = write(text_grammar(lark, field="f"), seed)
        assert text is None or (set(text) <= set("x()") and text.count("(") == text.count(")"))
        assert re.fullmatch(r"<\d{1,3}>", write(text_grammar(gbnf, field="f"), seed) or "")


@pytest.mark.parametrize("with_markers", [True, False])
def test_reasoning_comes_before_the_constrained_answer(with_markers: bool) -> None:
    def grammar(opened: bool) -> Grammar:
        return behind_reasoning(
            choice_grammar(["yes", "no"], field="f"),
            start="<think>",
            end="</think>",
            opened=opened,
            token_of=tokenizer(with_markers).added_id,
        )

    def written(wish: str, opened: bool) -> str:
        return write(grammar(opened), 3, wish=wish, with_markers=with_markers) or ""

    assert re.fullmatch(
        r"<think>\n1 < 2 </thin\n</think>\n{0,3}(yes|no)", written("<think>\n1 < 2 </thin\n</think>", opened=False)
    )
    assert written("", opened=False) is not None
    assert written("ye", opened=False) == "yes"
    assert re.fullmatch(r"so\n</think>\n\n(yes|no)", written("so\n</think>\n\n", opened=True))
    with pytest.raises(AssertionError, match="refused"):
        written("<think>so</think>maybe", opened=False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: json_grammar("{", field="f"), "f is not JSON"),
        (lambda: json_grammar([1], field="f"), "list"),
        (lambda: choice_grammar([], field="f"), "empty"),
        (lambda: choice_grammar(["a", ""], field="f"), "empty text"),
        (lambda: text_grammar(" \n", field="f"), "empty"),
        (lambda: grammar_from("choice", "abc", "f"), "array"),
        (lambda: grammar_from("regex", 3, "f"), "expected str"),
    ],
)
def test_what_is_no_grammar_at_all_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (json_grammar({"type": "objekt"}, field="response_format"), "objekt"),
        (json_grammar({"type": "object", "not": {}}, field="response_format"), "not"),
        (regex_grammar("(a", field="response_format"), "unclosed"),
        (regex_grammar("a(?=b)", field="response_format"), "look-around"),
        (text_grammar("root ::= (", field="response_format"), "GBNF"),
        (text_grammar("start: nothing", field="response_format"), "nothing"),
    ],
)
def test_what_does_not_compile_is_refused_in_the_compilers_words(grammar: Grammar, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        compiler().compile(grammar)
    assert re.match("response_format(: | cannot)", caught.value.message)
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_grammar")
    assert "<state>" not in caught.value.message


def test_compiled_grammars_are_kept_and_their_number_is_bounded() -> None:
    grammars = compiler()
    first = regex_grammar("keep", field="f")
    compiled = grammars.compile(first)
    assert grammars.compile(Grammar(grammar=first.grammar, field="f")) is compiled
    for number in range(GRAMMARS_MAX):
        grammars.compile(regex_grammar(f"x{number}", field="f"))
    assert grammars.find(first) is None


def test_matchers_of_one_grammar_do_not_share_a_state() -> None:
    compiled = compiler().compile(choice_grammar(["ab", "cd"], field="f"))
    one, other = compiled.matcher(), compiled.matcher()
    one.consume_tokens(tokenizer().encode("a"))
    assert len(allowed_tokens(one, compiled.token_count)) == 1
    assert len(allowed_tokens(other, compiled.token_count)) == 2


def test_a_model_that_no_grammar_can_follow_says_why() -> None:
    grammar = regex_grammar("a", field="guided_regex")
    for grammars, words in (
        (GrammarCompiler(None, (1,), 10), "no tokenizer"),
        (GrammarCompiler(lambda: "{}", (), 10), "no end token"),
        (GrammarCompiler(lambda: "{}", (50,), 10), "no end token"),
        (GrammarCompiler(lambda: "{}", (1,), 10), "cannot follow"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            grammars.compile(grammar)
        assert caught.value.param == "guided_regex"
