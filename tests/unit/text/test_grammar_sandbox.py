"""Grammars of strangers are compiled in a process that may die, and what they do there is a clear error."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures.constrained import END, backend, write
from weft.engine.grammars import GrammarCompiler
from weft.errors import QueueFullError, RequestError, presentable
from weft.request import Grammar
from weft.text.grammar_limits import CHOICES_MAX, GRAMMAR_BYTES_MAX, REFERENCES_MAX, RULES_MAX
from weft.text.grammar_sandbox import GrammarSandbox
from weft.text.grammar_worker import lark_of
from weft.text.grammars import choice_grammar, json_grammar, regex_grammar, text_grammar


def reference_chain(length: int) -> dict[str, Any]:
    links = {f"a{at}": {"$ref": f"#/$defs/a{at + 1}"} for at in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}}


def rule_chain(length: int) -> str:
    return "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(length)) + f'r{length}: "x"\n'


def slow_schema(properties: int = 8000) -> dict[str, Any]:
    """The compiler's time is quadratic in the number of properties."""
    return {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(properties)}}


def new_compiler(seconds: int = 2, memory_bytes: int = 256 << 20, **more: Any) -> GrammarCompiler:
    tokenizer = backend(())
    ends = (tokenizer.token_to_id(END),)
    sandbox = GrammarSandbox(tokenizer.to_str, ends, seconds=seconds, memory_bytes=memory_bytes)
    return GrammarCompiler(tokenizer.to_str, ends, tokenizer.get_vocab_size(), sandbox, **more)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = new_compiler()
    compiler.warm()
    yield compiler
    compiler.close()


def refusal(compiler: GrammarCompiler, grammar: Grammar) -> str:
    with pytest.raises(RequestError) as caught:
        compiler.compile(grammar)
    assert caught.value.code == "invalid_grammar"
    assert not any(word in caught.value.message for word in ("panic", "backtrace", ".rs", "<unknown>", "\n"))
    return caught.value.message


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (regex_grammar("a(", field="f"), 'f: invalid regex "a\\(": unclosed group$'),
        (json_grammar(reference_chain(2600), field="f"), f"f refers to 2601 def.*limit is {REFERENCES_MAX}"),
        (text_grammar(rule_chain(3000), field="f"), f"f has 3003 rules.*limit is {RULES_MAX}"),
        (json_grammar(slow_schema(), field="f"), "more than 2 s to compile .limits.grammar_seconds"),
        (text_grammar("root ::= " + "(" * 5000, field="f"), "nested too deeply"),
        (text_grammar("root ::= a", field="f"), "no rule a"),
        (Grammar(grammar="[" * 100_000, field="f"), "f"),
        (Grammar(grammar='{"grammars": 3}', field="f"), "f"),
    ],
)
def test_a_hostile_grammar_is_a_clear_error(compiler: GrammarCompiler, grammar: Grammar, words: str) -> None:
    assert re.search(words, refusal(compiler, grammar))


def test_what_overflows_the_stack_of_the_compiler_ends_only_its_fork(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References that the limits do not see: their names are escaped inside lark text."""
    schema = json.dumps(reference_chain(5000)).replace("$ref", "\\u0024ref")
    message = refusal(compiler, text_grammar(f"start: %json {schema}", field="f"))
    assert "nested too deeply to be compiled" in message
    assert compiler.compile(regex_grammar("after", field="f"))


def test_memory_is_bounded() -> None:
    compiler = new_compiler(seconds=20, memory_bytes=8 << 20)
    try:
        choices = "|".join(f"choice number {at}" for at in range(50_000))
        assert "limits.grammar_memory" in refusal(compiler, regex_grammar(choices, field="f"))
    finally:
        compiler.close()


def test_a_slow_grammar_holds_up_no_other(compiler: GrammarCompiler) -> None:
    slow = threading.Thread(target=lambda: refusal(compiler, json_grammar(slow_schema(9000), field="f")))
    slow.start()
    time.sleep(0.1)
    compiler.compile(choice_grammar(["left", "right", "up"], field="f"))
    assert slow.is_alive()
    slow.join()


def test_a_worker_that_was_killed_is_replaced() -> None:
    compiler = new_compiler()
    try:
        compiler.compile(regex_grammar("a", field="f"))
        sandbox: Any = compiler._sandbox
        sandbox._worker.end()
        time.sleep(0.1)
        assert compiler.compile(regex_grammar("b", field="f"))
    finally:
        compiler.close()


def test_the_cache_is_bounded_in_bytes_and_so_is_what_running_answers_hold(compiler: GrammarCompiler) -> None:
    grammars = [
        regex_grammar("|".join(f"choice number {number} {at}" for at in range(500)), field="f") for number in range(8)
    ]
    size_bytes = compiler.compile(grammars[0]).size_bytes
    assert 50_000 < size_bytes < 5_000_000
    small = new_compiler(cache_bytes=3 * size_bytes + size_bytes // 2)
    try:
        for grammar in grammars:
            small.compile(grammar)
        assert [small.find(grammar) is not None for grammar in grammars] == [False] * 5 + [True] * 3
        held = []
        with pytest.raises(QueueFullError, match=r"limits\.grammar_cache"):
            held += [small.compile(grammar) for grammar in grammars]
        held.clear()
        assert small.compile(grammars[0])
    finally:
        small.close()


def test_many_choices_are_fast_and_more_are_refused_with_the_limit(compiler: GrammarCompiler) -> None:
    most = [f"choice number {at}" for at in range(CHOICES_MAX)]
    compiler.compile(choice_grammar(most, field="guided_choice"))
    with pytest.raises(RequestError, match=f"guided_choice has 100000 texts; the limit is {CHOICES_MAX}"):
        choice_grammar([str(at) for at in range(100_000)], field="guided_choice")


def test_a_long_grammar_is_refused_where_it_is_written_down() -> None:
    with pytest.raises(RequestError, match=f"limit is {GRAMMAR_BYTES_MAX}"):
        regex_grammar("a" * GRAMMAR_BYTES_MAX, field="f")
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"not": nested}
    with pytest.raises(RequestError, match="nested more than 100 levels"):
        json_grammar(nested, field="f")


def test_choices_may_have_any_characters() -> None:
    choices = [r"\d", "a/b", "(x|y)*", "[^]", "{2}", "$^.", "a\tb\r\n", "é#&~-", "\"'", "  ", "🏔\x00"]
    assert {write(choice_grammar([choice], field="f"), 1) for choice in choices} == set(choices)


def test_gbnf_is_rewritten_in_linear_time_and_means_the_same() -> None:
    rules = "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(1900)) + 'r1900 ::= "x"\n'
    began_s = time.process_time()
    lark = lark_of(rules)
    assert time.process_time() - began_s < 1.0
    assert lark.count("\n") > 1900
    assert "start: R0" in lark
    assert lark_of('start: "::="') == 'start: "::="'
    looped = lark_of('root ::= item+\nitem ::= "(" item ")" | fooBar\nfooBar ::= [0-9]\n')
    assert "item: " in looped
    assert "FOO_BAR: " in looped
    for broken in ('root ::= "', "root ::= a{", "x ::= y", "root ::= [\\", "a b ::= c", 'root ::= "\\q"'):
        with pytest.raises(ValueError, match="GBNF"):
            lark_of(broken)


@pytest.mark.parametrize(
    "message",
    [
        "panic: assertion failed: grammar.symbols.len() < 1\n<backtrace>\n 0: <unknown>",
        "",
        "\n<state>\nx",
        "thread 'main' panicked",
        "at /opt/registry/src/x/lib.rs:12",
        "File /usr/lib/x.py",
    ],
)
def test_what_a_library_says_of_itself_is_not_shown(message: str) -> None:
    assert presentable(message, otherwise="no") == "no"


def test_what_a_library_says_of_the_input_is_shown_and_cut() -> None:
    assert presentable("unclosed group\n<state>\nx", otherwise="no") == "unclosed group"
    assert len(presentable("x" * 5000, otherwise="no")) < 700


def test_a_compile_keeps_a_lower_priority_that_its_engine_was_started_with() -> None:
    """Under ``nice -n 19`` no user may raise it again: the answer to a grammar must still come."""
    tokenizer = backend(())
    sandbox = GrammarSandbox(tokenizer.to_str, (tokenizer.token_to_id(END),), seconds=2, memory_bytes=1 << 28)
    found = []

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def engine(own: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        found.append(sandbox.compile(priority))

    for own in (max(priority(), 12), 19):
        thread = threading.Thread(target=engine, args=(own,))
        thread.start()
        thread.join()
        assert found[-1] == own
