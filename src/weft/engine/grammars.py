"""Grammars of requests, compiled once: what ``grammar`` in SamplingParams needs before a sequence can run.

    Grammar (text) --build, in any thread--> CompiledGrammar --matcher()--> one LLMatcher per sequence
                        |                        |
                  LLTokenizer (once)      kept in a bounded cache, by text

Compiling takes from less than a millisecond to a good part of a second, so whoever must not wait (the loop of
the engine process) calls ``build`` in a thread of its own and ``keep``s the result before it submits the
request. ``compile`` is both at once, for who may wait. A matcher is a copy of the compiled one, which costs
microseconds; what the first mask has to work out is shared among all copies, so ``build`` asks for it too.

The tokenizer's own form (a trie of all tokens' bytes) costs some tenths of a second, in which Python stands
still, and a few dozen MB: it is made at the first grammar, or by ``warm`` when a server starts.

A grammar is text from a client. It cannot read or run anything; what it can do is be large, and the library's
limits on its size, its lexer and the work of one step hold for it (law L11). What does not compile is the
request's error, in the compiler's words.

Rejected: compiling in the HTTP process (a second tokenizer in memory, and the same grammar compiled twice);
xgrammar (masks are faster, compiling is dozens of times slower, and it brings its own torch extensions).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from weft.errors import RequestError
from weft.request import Grammar

GRAMMARS_MAX = 64
"""Compiled grammars that are kept: a client that sends the same schema again waits for nothing."""
_MESSAGE_CHARS_MAX = 600


class CompiledGrammar:
    """``matcher`` gives one that has seen no token. ``token_count``: the tokens that its masks tell of."""

    __slots__ = ("_prototype", "token_count")

    def __init__(self, prototype: Any, token_count: int) -> None:
        self._prototype = prototype
        self.token_count = token_count

    def matcher(self) -> Any:
        return self._prototype.deep_copy()


class GrammarCompiler:
    """``read_tokenizer`` returns the text of the checkpoint's tokenizer.json; None where there is none, and
    every grammar is refused then. ``eos_ids``: the tokens that may end an answer, once its grammar is complete;
    ``vocab_size``: of the model."""

    def __init__(self, read_tokenizer: Callable[[], str] | None, eos_ids: tuple[int, ...],
                 vocab_size: int) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(token for token in eos_ids if token < vocab_size)
        self._tokenizer: Any = None
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises RequestError that names the grammar's field, with what the compiler says."""
        found = self.find(grammar)
        if found is None:
            found = self.build(grammar)
            self.keep(grammar, found)
        return found

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        found = self._kept.get(grammar)
        if found is not None:
            self._kept.move_to_end(grammar)
        return found

    def keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._kept[grammar] = compiled
        if len(self._kept) > GRAMMARS_MAX:
            self._kept.popitem(last=False)

    def build(self, grammar: Grammar) -> CompiledGrammar:
        """Changes nothing but the tokenizer, which it makes: one thread at a time. Raises as ``compile``."""
        import llguidance

        self.warm(field=grammar.field)
        prototype = llguidance.LLMatcher(self._tokenizer, grammar.grammar, log_level=0)
        if not prototype.is_error():
            prototype.deep_copy().compute_bitmask()
        if prototype.is_error():
            raise RequestError(f"{grammar.field}: {_said(prototype.get_error())}", param=grammar.field,
                               code="invalid_grammar")
        return CompiledGrammar(prototype, self._tokenizer.vocab_size)

    def warm(self, *, field: str = "grammar") -> None:
        """Make the tokenizer ready, if it is not. Raises RequestError where this model cannot be constrained."""
        if self._tokenizer is not None:
            return
        if self._read_tokenizer is None or not self._eos_ids:
            missing = "tokenizer" if self._read_tokenizer is None else "end token, with which a grammar ends"
            raise RequestError(f"{field} is not supported: this model has no {missing}", param=field,
                               code="unsupported_parameter")
        import llguidance

        text = self._read_tokenizer()
        # Models round their vocabulary up; one below its tokenizer's is refused by the library, hence twice.
        for size in (self._vocab_size, None):
            try:
                self._tokenizer = llguidance.LLTokenizer(text, n_vocab=size, eos_token=list(self._eos_ids))
                return
            except ValueError as error:
                refused = error
        raise RequestError(f"{field} is not supported: a grammar cannot follow this model's tokenizer "
                           f"({refused})", param=field, code="unsupported_parameter")


def _said(message: str) -> str:
    """The compiler's sentence without the dump of its state."""
    said = message.split("\n<state>")[0].strip()
    return said if len(said) <= _MESSAGE_CHARS_MAX else said[:_MESSAGE_CHARS_MAX] + " ..."
