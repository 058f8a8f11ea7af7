"""The engine's client of the process that compiles untrusted grammars (``weft.text.grammar_worker``).

    check(grammar)   any thread; waits for the verdict        RequestError | VettedGrammar
    compile(build)   runs ``build`` on a stack of 64 MiB, at low priority

The compiler is native code that a grammar can crash, so the engine compiles only grammars that a separate process has
compiled before: within the limits of time, memory and stack, with its first masks built. The second compilation costs
the same time again, in a thread of low priority, and gives the engine matchers that need no process.

The worker starts with the first grammar and ends with the engine. A worker that died is replaced at the next grammar.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from weft.config import EngineConfig
from weft.errors import ConfigError, EngineUnavailableError, RequestError, presentable
from weft.request import GRAMMAR_STEP_S, Grammar
from weft.text.grammar_worker import COMPILE_STACK_BYTES, JOBS_MAX, Start, Verdict
from weft.text.schema_errors import explained
from weft.text.tokenizer_file import tokenizer_path, tokenizer_text
from weft.text.worker_main import JobFunction
from weft.text.workers import BoundedWorker
from weft.units import parse_bytes

ENGINE_STACK_BYTES = 64 << 20
_VERDICT_WITHIN_S = 120.0
"""Seconds until a worker counts as hung: far more than any grammar may take, even after others in the queue."""
_PRIORITY = 10
_PREDICATES = ("has ", "is ", "takes ", "needs ", "refers ", "cannot ")
"""First words of weft's own reasons; the compiler's reasons do not continue a sentence."""
Built = TypeVar("Built")


def in_one_line(error: str) -> str:
    """Return the compiler's error in one line, without its drawings of the text. For a regex, return the regex and its
    error, also for a pattern of a schema."""
    regex = re.search(r'(invalid regex ".*?") \(in regex\).*\berror: ([^\n]+)', error, re.DOTALL)
    if regex is None and (pattern := re.search(r"^regex parse error:\n    (.*?)\n.*\berror: (.+)", error, re.DOTALL)):
        return f"invalid pattern {pattern[1]!r}: {pattern[2].strip()}"
    return f"{regex[1]}: {regex[2]}" if regex else error.split("\n", 1)[0]


@dataclass(frozen=True, slots=True)
class VettedGrammar:
    """A grammar that compiled within the limits. ``size_bytes``: memory of the compiled grammar."""

    text: str
    size_bytes: int


class GrammarSandbox:
    """The engine's side of the grammar worker. ``read_tokenizer`` returns the text of the tokenizer.json. ``seconds``
    of CPU and ``memory_bytes`` are the limits of one grammar, ``step_s``: the seconds of a step that all grammars
    together may take."""

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        eos_ids: tuple[int, ...],
        *,
        seconds: int,
        memory_bytes: int,
        step_s: float = GRAMMAR_STEP_S,
    ) -> None:
        self.read_tokenizer = read_tokenizer
        self._eos_ids = eos_ids
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._step_s = step_s
        self._lock = threading.Lock()
        self._worker: BoundedWorker | None = None

    def check(self, grammar: Grammar, vocab_size: int) -> VettedGrammar:
        """Compile ``grammar`` in the worker. Raise RequestError with the compiler's reason, EngineUnavailableError
        where the worker failed."""
        verdict = self._ask(grammar.grammar, vocab_size)
        if verdict.error:
            reason = presentable(explained(in_one_line(verdict.error), grammar.grammar), otherwise="cannot be compiled")
            separator = " " if reason.startswith(_PREDICATES) else ": "
            raise RequestError(f"{grammar.field}{separator}{reason}", param=grammar.field, code="invalid_grammar")
        return VettedGrammar(verdict.grammar, verdict.size_bytes)

    def compile(self, build: Callable[[], Built]) -> Built:
        """Return or raise the result of ``build``, called on a thread with a large stack."""
        result: Future[Built] = Future()

        def run() -> None:
            try:
                if sys.platform == "linux":  # on Linux each thread has its own priority
                    thread = threading.get_native_id()
                    present = os.getpriority(os.PRIO_PROCESS, thread)
                    # A server under `nice` may not raise its priority.
                    os.setpriority(os.PRIO_PROCESS, thread, max(present, _PRIORITY))
                result.set_result(build())
            except BaseException as error:
                result.set_exception(error)

        with self._lock:
            before_bytes = threading.stack_size(ENGINE_STACK_BYTES)
            try:
                threading.Thread(target=run, name="compile-grammar", daemon=True).start()
            finally:
                threading.stack_size(before_bytes)
        return result.result()

    def close(self) -> None:
        """End the worker. Idempotent. Waiting checks raise EngineUnavailableError."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _ask(self, grammar: str, vocab_size: int) -> Verdict:
        with self._lock:
            if self._worker is None or self._worker.gone:
                start = Start(
                    self.read_tokenizer(),
                    vocab_size,
                    list(self._eos_ids),
                    self._seconds,
                    self._memory_bytes,
                    self._step_s,
                )
                function = JobFunction(
                    "weft.text.grammar_worker:prepare", self._memory_bytes, JOBS_MAX, self._seconds, COMPILE_STACK_BYTES
                )
                self._worker = BoundedWorker(function, msgspec.msgpack.encode(start))
            worker = self._worker
        try:
            answer = worker.receive(worker.send(grammar.encode()), _VERDICT_WITHIN_S)
            if answer is None:
                raise TimeoutError
        except OSError:  # TimeoutError is an OSError
            worker.end()
            raise EngineUnavailableError("the process that compiles grammars has ended; try again") from None
        return msgspec.msgpack.decode(answer, type=Verdict)


def grammar_sandbox(config: EngineConfig, directory: Path, eos_ids: tuple[int, ...]) -> GrammarSandbox | None:
    """Return the sandbox for the checkpoint in ``directory``; None if it has no tokenizer.json. Raise ConfigError for
    limits that cannot work."""
    if config.grammar_seconds < 1:
        raise ConfigError(
            f"limits.grammar_seconds is {config.grammar_seconds}; it must be at least 1", param="limits.grammar_seconds"
        )
    memory_bytes = parse_bytes(config.grammar_memory, flag="limits.grammar_memory")
    path = tokenizer_path(directory)
    if not path.is_file():
        return None
    return GrammarSandbox(
        lambda: tokenizer_text(path),
        eos_ids,
        seconds=config.grammar_seconds,
        memory_bytes=memory_bytes,
        step_s=config.grammar_step_ms / 1e3,
    )
