"""Answers that must match something, in Python: by keyword, or as a Grammar in SamplingParams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.fixtures.checkpoints import checkpoint
from weft import Engine, SamplingParams
from weft.errors import RequestError
from weft.text.grammars import json_grammar


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(str(checkpoint("qwen3_5")), memory="16MB", max_model_len=256, threads=1) as made:
        yield made


def test_keywords_make_answers_match(engine: Engine) -> None:
    def answer(**grammar: object) -> str:
        [completion] = engine.generate("x", max_tokens=60, seed=1, temperature=1.0, **grammar)
        assert completion.finish_reason == "stop"
        return completion.text

    assert answer(guided_choice=["left", "right"]) in ("left", "right")
    assert re.fullmatch("[0-9]{4}", answer(guided_regex="[0-9]{4}"))
    assert json.loads(answer(guided_json={"enum": ["a", 1]})) in ("a", 1)
    assert answer(guided_grammar='start: "x" "y"') == "xy"


def test_streams_and_chats_take_them_too(engine: Engine) -> None:
    assert "".join(piece.text for piece in engine.stream("x", guided_regex="ab{3}")) == "abbb"
    assert engine.chat([{"role": "user", "content": "?"}], guided_choice=["yes"]).text == "yes"


def test_a_grammar_can_be_part_of_the_parameters(engine: Engine) -> None:
    grammar = json_grammar({"type": "null"}, field="f")
    sampling = SamplingParams(temperature=1.0, seed=2, max_tokens=60, grammar=grammar)
    assert [completion.text for completion in engine.generate(["x", "y"], sampling)] == ["null", "null"]


def test_a_grammar_that_outgrows_its_limits_is_the_requests_error(engine: Engine) -> None:
    """Not the engine's: it would come again, and the engine is well."""
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(600)}}
    with pytest.raises(RequestError, match=r"max is \d+") as caught:
        engine.generate("x", guided_json=wide, max_tokens=60)
    assert (caught.value.param, caught.value.code) == ("guided_json", "invalid_grammar")
    assert engine.generate("x", guided_choice=["yes"])[0].text == "yes"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "(a"}, "(?s)guided_regex: .*unclosed"),
        ({"guided_json": {"type": "objekt"}}, "objekt"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing_running(
    engine: Engine, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        engine.generate("x", **fields)
    assert engine.stats().running == engine.stats().waiting == 0
    assert engine.generate("x", guided_regex=None, max_tokens=1)[0].tokens
