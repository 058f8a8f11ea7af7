"""Seeded random mutations of schemas, grammars, templates and bodies end in a result or a clear error.

    corpus --cut, repeat, swap, nest, splice--> input --> the code that meets strangers

A budget of seconds for each kind, small in the suite; ``make fuzz`` gives ten minutes in all. A failure
prints the seed of its input, and ``WEFT_FUZZ_SEED`` begins there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.text.test_grammar_sandbox import new_compiler, reference_chain, rule_chain
from tests.unit.text.test_template_sandbox import PLAIN, sandbox, turns
from weft.errors import WeftError
from weft.request import Grammar
from weft.server.protocol import ChatBody, CompletionBody, grammar_of, parse_body, sampling_params
from weft.text.grammars import grammar_from
from weft.text.tools.definitions import read_choice, read_tools

SECONDS = float(os.environ.get("WEFT_FUZZ_SECONDS", "1"))
COUNT_MIN = 16
"""Texts on a machine that is too slow for the seconds."""
FIRST_SEED = int(os.environ.get("WEFT_FUZZ_SEED", "0"))
TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures" / "family_templates"
ODD = ("\x00", "\ud800", "\\", "\"", "1e999", "-1", "9" * 400, "null", "{", "[", "🏔", "{{", "%}", "\n")
PAIRS = (("(", ")"), ("[", "]"), ('{"a":', "}"), ("{%if 1%}", "{%endif%}"))
INTERNALS = ("panic", "backtrace", "Traceback", ".rs:", "site-packages")

SCHEMAS = [json.dumps(schema) for schema in (
    reference_chain(40), {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}},
                          "required": ["a"], "additionalProperties": False},
    {"anyOf": [{"enum": ["x", 1, None]}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}]},
    {"type": "string", "pattern": "^a+(b|c){2,5}$", "maxLength": 9, "format": "date-time"})]
GRAMMARS = [rule_chain(40), 'root ::= "<" num{1,3} ">" | "(" root ")"\nnum ::= [0-9a-f]+ # n\n',
            'start: (NAME "," )* %json {"type": "object"}\nNAME: /[a-z]{1,8}/ & ~/b.*/\n%ignore / /\n']
REGEXES = [r"(a|b)*\d{2,30}[^x-z]?", r"\p{L}+(\s|$)", r"((a{1,9}){1,9}){1,9}"]
BODIES = [json.dumps(body) for body in (
    {"model": "m", "prompt": ["a", [1, 2]], "n": 2, "temperature": 0.5, "stop": ["x"], "seed": 1,
     "logprobs": 2, "logit_bias": {"5": -1.5}, "guided_choice": ["a", "b"],
     "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]},
                  {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
     "tool_choice": "required", "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}})]


def mutations(corpus: list[str]) -> Iterator[tuple[int, str]]:
    """(seed, text) until the time is over; the corpus itself first."""
    end_s = time.monotonic() + SECONDS
    seed = FIRST_SEED
    while time.monotonic() < end_s or seed < FIRST_SEED + COUNT_MIN:
        draw = random.Random(seed)
        text = corpus[seed % len(corpus)]
        for _ in range(0 if seed < len(corpus) else draw.randint(1, 6)):
            text = _mutated(draw, text, corpus)
        yield seed, text
        seed += 1


def _mutated(draw: random.Random, text: str, corpus: list[str]) -> str:
    first, last = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    part = text[first:last][:60]
    match draw.randrange(7):
        case 0:
            return text[:first] + text[last:]
        case 1:
            return text[:first] + part * draw.choice((2, 50, 2000)) + text[last:]
        case 2:
            other = draw.choice(corpus)
            return text[:first] + other[draw.randrange(len(other) + 1):]
        case 3:
            return text[:first] + draw.choice(ODD) + text[last if draw.random() < 0.5 else first:]
        case 4:
            depth = draw.choice((3, 100, 3000))
            opening, closing = draw.choice(PAIRS)
            return text[:first] + opening * depth + part + closing * depth + text[last:]
        case 5:
            return text[:first] + chr(draw.randrange(128)) + text[first + 1:]
        case _:
            return text[:first] + text[last:] + part


def check(corpus: list[str], run: Callable[[str], Any]) -> None:
    """``run`` returns, or raises what a client may see."""
    count = refused = 0
    for seed, text in mutations(corpus):
        count += 1
        refusal = None
        try:
            run(text)
        except WeftError as error:
            refusal = error
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__} for {text[:300]!r}") from error
        if refusal is not None:
            refused += 1
            assert refusal.status in (400, 503), f"seed {seed}: {refusal.message}"
            assert not any(word in refusal.message for word in INTERNALS), f"seed {seed}: {refusal.message}"
    assert 0 < refused < count


@pytest.mark.parametrize(("kind", "corpus"), [("json", SCHEMAS), ("grammar", GRAMMARS), ("regex", REGEXES)])
def test_mutated_grammars_compile_or_are_refused(kind: str, corpus: list[str]) -> None:
    compiler = new_compiler(seconds=1, memory_bytes=128 << 20)

    def run(text: str) -> None:
        grammar: Grammar = grammar_from(kind, text, "f")
        matcher = compiler.build(grammar).matcher()
        matcher.compute_bitmask()

    try:
        check(corpus, run)
    finally:
        compiler.close()


def test_mutated_bodies_are_read_or_refused() -> None:
    def run(text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        if "messages" in text:
            chat = parse_body(raw, ChatBody)
            tools = read_tools(chat.tools)
            read_choice(chat.tool_choice, tools)
            sampling_params(chat, {}, n=chat.n, max_tokens=1, grammar=grammar_of(chat)).check(1000)
        else:
            body = parse_body(raw, CompletionBody)
            sampling_params(body, {}, n=body.n, logprobs=body.logprobs, max_tokens=body.max_tokens,
                            grammar=grammar_of(body)).check(1000)

    check(BODIES, run)


def test_mutated_templates_are_rendered_or_refused() -> None:
    def run(text: str) -> None:
        source = text.replace("\ud800", "")  # a file has none
        with sandbox(source, seconds=1.0, memory_bytes=64 << 20) as template:
            asyncio.run(template.write(turns("hi"), chars_cut=10_000))

    check([PLAIN, *(path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))[:6])], run)
