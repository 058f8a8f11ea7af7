"""Grammars of requests, compiled once before their sequences run (``grammar`` in SamplingParams).

    Grammar --check, in the sandbox--> vetted text --build--> CompiledGrammar --matcher()--> one per sequence
                                                                    |
                                                          a cache bounded in bytes

A grammar is text from a client, and the compiler is native code that a grammar can crash. So the sandbox compiles it
first, in a process that may die; a refusal of the sandbox is the request's error. A grammar that passes is compiled
again here, by the same code on a larger stack.

A loop that must not wait calls ``build`` in a thread and ``keep``s the result before it submits the request;
``compile`` does both. A matcher is a copy of the compiled grammar, which costs microseconds; all copies share the work
of the first mask.

The cache drops the least recently used grammars above its limit; running answers may hold the same number of bytes
again, and a grammar beyond that is refused (law L11).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from weft.errors import QueueFullError, RequestError, presentable
from weft.request import GRAMMAR_STEP_S, Grammar

GRAMMARS_MAX = 256
"""Most compiled grammars in the cache: a client that sends a cached schema again does not wait."""
CACHE_BYTES_MAX = 512 << 20
_BYTES_PER_CHARACTER = 256
"""Guessed bytes of a compiled grammar per character, for grammars that no sandbox measured."""


class Vetted(Protocol):
    @property
    def text(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


class Sandbox(Protocol):
    """A sandbox for compilations: ``weft.text.grammar_sandbox.GrammarSandbox``. Both methods may be called in any
    thread."""

    def check(self, grammar: Grammar, vocab_size: int) -> Vetted:
        """Compile ``grammar`` within the limits. Raise RequestError for a grammar that cannot be compiled."""

    def compile(self, build: Callable[[], Any]) -> Any:
        """Return the result of ``build``, called in a thread with a large stack."""

    def close(self) -> None: ...


class TokenGrammar:
    """A compiled grammar. ``matcher`` returns a matcher that has seen no token. ``token_count``: the tokens
    that its masks describe. ``size_bytes``: the memory that it holds. ``step_s``: seconds of a step that all grammars
    may take."""

    __slots__ = ("__weakref__", "_prototype", "_tokenizer", "size_bytes", "step_s", "token_count")

    def __init__(self, prototype: Any, tokenizer: Any, size_bytes: int, step_s: float = GRAMMAR_STEP_S) -> None:
        self._prototype = prototype
        self._tokenizer = tokenizer
        self.token_count: int = tokenizer.vocab_size
        self.size_bytes = size_bytes
        self.step_s = step_s

    def matcher(self) -> Any:
        return self._prototype.deep_copy()

    def forced_tokens(self, matcher: Any) -> list[int]:
        """Return the text that must come next, in tokens; empty if there is a choice."""
        text = matcher.compute_ff_bytes()
        return self._tokenizer.tokenize_partial(text)[0] if text else []


class GrammarCompiler:
    """The compiler of one model's grammars, and its cache. ``read_tokenizer`` returns the text of the checkpoint's
    tokenizer.json; without one every grammar is refused. ``eos_ids``: the tokens that may end an answer, once its
    grammar is complete; ``vocab_size``: of the model. ``step_s``: as of ``TokenGrammar``; ``limits``: of the parser,
    those of the sandbox. Without a ``sandbox`` grammars are compiled unchecked: for grammars of the program's own."""

    def __init__(
        self,
        read_tokenizer: Callable[[], str] | None,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        sandbox: Sandbox | None = None,
        *,
        cache_bytes: int = CACHE_BYTES_MAX,
        step_s: float = GRAMMAR_STEP_S,
        limits: Any = None,
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(token for token in eos_ids if token < vocab_size)
        self._sandbox = sandbox
        self._cache_bytes_max = cache_bytes
        self._step_s = step_s
        self._limits = limits
        self._tokenizer: Any = None
        self._cache: OrderedDict[Grammar, TokenGrammar] = OrderedDict()
        self._live: weakref.WeakSet[TokenGrammar] = weakref.WeakSet()

    def compile(self, grammar: Grammar) -> TokenGrammar:
        """Return the compiled grammar, from the cache or new. Raise RequestError that names the grammar's field, with
        the compiler's message."""
        compiled = self.find(grammar)
        if compiled is None:
            compiled = self.build(grammar)
            self.keep(grammar, compiled)
        return compiled

    def find(self, grammar: Grammar) -> TokenGrammar | None:
        compiled = self._cache.get(grammar)
        if compiled is not None:
            self._cache.move_to_end(grammar)
        return compiled

    def keep(self, grammar: Grammar, compiled: TokenGrammar) -> None:
        """Put ``compiled`` into the cache. Raise QueueFullError where running answers hold too much; the grammar is not
        in the cache then."""
        in_use_bytes = sum(other.size_bytes for other in self._live) - self.cached_bytes
        if in_use_bytes and in_use_bytes + compiled.size_bytes > self._cache_bytes_max:
            raise QueueFullError(
                f"{compiled.size_bytes} bytes of a compiled grammar find no room: grammars of running "
                f"requests hold {in_use_bytes}; the limit is {self._cache_bytes_max} "
                "(limits.grammar_cache). Try "
                "again later",
                param="limits.grammar_cache",
                code="queue_full",
            )
        self._live.add(compiled)
        self._cache[grammar] = compiled
        while len(self._cache) > 1 and (len(self._cache) > GRAMMARS_MAX or self.cached_bytes > self._cache_bytes_max):
            self._cache.popitem(last=False)

    @property
    def cached_bytes(self) -> int:
        return sum(compiled.size_bytes for compiled in self._cache.values())

    def build(self, grammar: Grammar) -> TokenGrammar:
        """Compile ``grammar`` without the cache. The only change is to the tokenizer, which must be ``warm`` before two
        threads build. Raise the errors of ``compile``."""
        self.warm(field=grammar.field)
        if self._sandbox is None:
            return self._build(grammar.field, grammar.grammar, _BYTES_PER_CHARACTER * len(grammar.grammar))
        vetted = self._sandbox.check(grammar, self._tokenizer.vocab_size)
        compiled: TokenGrammar = self._sandbox.compile(
            lambda: self._build(grammar.field, vetted.text, vetted.size_bytes)
        )
        return compiled

    def _build(self, field: str, text: str, size_bytes: int) -> TokenGrammar:
        import llguidance

        prototype = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not prototype.is_error():
            prototype.deep_copy().compute_bitmask()
        if prototype.is_error():
            reason = presentable(prototype.get_error(), otherwise="it cannot be compiled")
            raise RequestError(f"{field}: {reason}", param=field, code="invalid_grammar")
        return TokenGrammar(prototype, self._tokenizer, size_bytes, self._step_s)

    def warm(self, *, field: str = "grammar") -> None:
        """Build the tokenizer, once. Raise RequestError if this model cannot be constrained."""
        if self._tokenizer is not None:
            return
        if self._read_tokenizer is None or not self._eos_ids:
            missing = "tokenizer" if self._read_tokenizer is None else "end token, with which a grammar ends"
            raise RequestError(
                f"{field} is not supported: this model has no {missing}", param=field, code="unsupported_parameter"
            )
        import llguidance

        text = self._read_tokenizer()
        # Models round their vocabulary up. One smaller than the tokenizer's is refused, hence the second try.
        for size in (self._vocab_size, None):
            try:
                self._tokenizer = llguidance.LLTokenizer(text, n_vocab=size, eos_token=list(self._eos_ids))
                return
            except ValueError as error:
                refused = error
        raise RequestError(
            f"{field} is not supported: a grammar cannot follow this model's tokenizer "
            f"({presentable(str(refused), otherwise='it cannot be read')})",
            param=field,
            code="unsupported_parameter",
        )

    def close(self) -> None:
        """End the sandbox. Idempotent."""
        if self._sandbox is not None:
            self._sandbox.close()
