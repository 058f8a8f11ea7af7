"""The worker of grammars: it compiles each untrusted grammar in a fork (``weft.text.workers``).

    Start -> tokenizer (built once) ---fork---> lark -> compile -> first masks -> Verdict

    root ::= "<" num ">"          start: "<" NUM ">"
    num  ::= [0-9]{1,3}    ->     NUM: /[0-9]/{1,3}

The tokenizer is built once. Every job runs in a fork, which shares it and costs some milliseconds. So a grammar that is
slow, large or crashes the compiler delays no other grammar, and leaves nothing in the process.

The first masks are built on a stack of 1 MiB, half the stack of the engine's mask threads. The grammar is compiled on
at most 8 MiB, an eighth of the stack in the engine. Compiling is deterministic, so a grammar that passed here stays
within the engine's stack too.

GBNF, the notation of llama.cpp, is rewritten as lark. llguidance parses it; its rules are resolved here, in time linear
in their number. A rule becomes a terminal once all rules that it refers to are terminals. A recursive rule never
becomes a terminal, and neither does ``root``.
"""

from __future__ import annotations

import ctypes
import re
import resource
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.text.grammar_limits import check_shape, parser_limits
from weft.text.worker_main import Limit

JOBS_MAX = 4
"""Most forks at once."""
COMPILE_STACK_BYTES = 8 << 20
MASK_STACK_BYTES = 1 << 20
_WALK_TOKENS = 8
_LARK_START = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")
_CAMEL_CASE = re.compile(r"([a-z])([A-Z])")


def lark_of(grammar: str) -> str:
    """Return ``grammar`` in lark; a text that is lark already is returned unchanged. Raise ValueError that names the
    position of an error."""
    if "::=" not in grammar or _LARK_START.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import GbnfToLarkError, GrammarParser

    try:
        rules = list(GrammarParser().parse(grammar).values())
    except GbnfToLarkError as error:
        raise ValueError(f"cannot be read as GBNF: {error}") from None
    except RecursionError:
        raise ValueError("cannot be read as GBNF: its groups are nested too deeply") from None
    except (IndexError, ValueError) as error:
        raise ValueError("cannot be read as GBNF: it ends in the middle of a rule") from error
    _resolve(rules)
    return "%llguidance {}\n\n" + "\n".join(str(rule) for rule in rules) + "\n"


def _resolve(rules: list[Any]) -> None:
    """Link references to their rules and give every rule its lark name, in place. Raise ValueError."""
    by_name = {rule.name: rule for rule in rules}
    if "root" not in by_name:
        raise ValueError("cannot be read as GBNF: it has no rule root")
    users: dict[str, list[str]] = defaultdict(list)
    open_references: dict[str, int] = {}
    for rule in rules:
        rule.alternatives = rule.alternatives.simplify()
        names = set()
        for node in _references(rule):
            if node.name not in by_name:
                raise ValueError(f"cannot be read as GBNF: there is no rule {node.name}")
            node.target = by_name[node.name]
            names.add(node.name)
        for name in names:
            users[name].append(rule.name)
        open_references[rule.name] = len(names)
    ready = [name for name, count in open_references.items() if not count]
    while ready:
        name = ready.pop()
        if name == "root":
            continue
        by_name[name].rule_is_terminal = True
        for user in users[name]:
            open_references[user] -= 1
            if not open_references[user]:
                ready.append(user)
    renamed: set[str] = set()
    for rule in rules:
        name = "start" if rule.name == "root" else _CAMEL_CASE.sub(r"\1_\2", rule.name.replace("-", "_"))
        rule.name = name.upper() if rule.rule_is_terminal else name.lower()
        if rule.name in renamed:
            raise ValueError(f"cannot be read as GBNF: two rules are called {rule.name} in lark")
        renamed.add(rule.name)


def _references(rule: Any) -> Iterator[Any]:
    from llguidance.gbnf_to_lark import RuleRefNode

    nodes = [rule]
    while nodes:
        node = nodes.pop()
        if isinstance(node, RuleRefNode):
            yield node
        nodes += node.children()


class Start(msgspec.Struct):
    """The start of a worker. ``seconds`` of CPU and ``memory_bytes`` are limits of one job. ``tokenizer``: text of the
    tokenizer.json. ``step_s``: seconds of a step that grammars may take."""

    tokenizer: str
    vocab_size: int
    eos_ids: list[int]
    seconds: int
    memory_bytes: int
    step_s: float


class Verdict(msgspec.Struct):
    """The result of a job. ``error`` is empty for a grammar that compiles. ``grammar`` is the text to compile: the
    job's, in lark. ``size_bytes``: memory that the compiled grammar holds."""

    error: str = ""
    grammar: str = ""
    size_bytes: int = 0


class CheckGrammar:
    """The job that compiles a grammar. The messages of ``failed`` name the flags."""

    def __init__(self, start: Start) -> None:
        from llguidance import LLTokenizer

        self._start = start
        self._tokenizer = LLTokenizer(start.tokenizer, n_vocab=start.vocab_size, eos_token=start.eos_ids)

    def __call__(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(_verdict(self._tokenizer, body, parser_limits(self._start.step_s)))

    def failed(self, limit: Limit) -> bytes:
        words = {
            "seconds": f"takes more than {self._start.seconds} s to compile (limits.grammar_seconds)",
            "memory": f"needs more than {self._start.memory_bytes} bytes to compile (limits.grammar_memory)",
            "stack": "is nested too deeply to be compiled",
        }
        return msgspec.msgpack.encode(Verdict(error=words[limit]))


def prepare(start: bytes) -> tuple[bytes, CheckGrammar]:
    return b"", CheckGrammar(msgspec.msgpack.decode(start, type=Start))


def _verdict(tokenizer: Any, grammar_json: bytes, limits: Any) -> Verdict:
    try:
        grammars = msgspec.json.decode(grammar_json)["grammars"]
        check_shape(grammars)
        for grammar in grammars:
            if "gbnf" in grammar:
                grammar["lark_grammar"] = lark_of(grammar.pop("gbnf"))
        check_shape(grammars)
    except RecursionError:
        return Verdict(error="is nested too deeply")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Verdict(error=str(error))
    from llguidance import LLMatcher

    text = msgspec.json.encode({"grammars": grammars}).decode()
    before_bytes = _used_bytes()
    prototype = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if prototype.is_error():
        return Verdict(error=str(prototype.get_error()))
    walker = prototype.deep_copy()
    reason = _on_small_stack(walker)
    if reason:
        return Verdict(error=reason)
    return Verdict(grammar=text, size_bytes=max(_used_bytes() - before_bytes, len(text)))


def _on_small_stack(walker: Any) -> str:
    """Build the first masks of ``walker`` along a possible answer. Return the error, if any."""
    errors: list[str] = []

    def walk() -> None:
        for _ in range(_WALK_TOKENS):
            mask = walker.compute_bitmask()
            if walker.is_error():
                errors.append(str(walker.get_error()))
                return
            word = next((token for token, byte in enumerate(mask) if byte), None)
            if word is None or walker.is_stopped():
                return
            walker.consume_token(word * 8 + (mask[word] & -mask[word]).bit_length() - 1)

    threading.stack_size(MASK_STACK_BYTES)
    thread = threading.Thread(target=walk)
    thread.start()
    thread.join()
    return errors[0] if errors else ""


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _used_bytes() -> int:
    """Return the bytes that this process holds from malloc; the largest resident size if the C library does not report
    them."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
