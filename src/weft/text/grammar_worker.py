"""The process that compiles untrusted grammars: ``python -m weft.text.grammar_worker``.

    stdin:   one Start, then grammars; its end means that the engine is gone
    stdout:  one Verdict per grammar, in the order in which they end

                           fork per job
    Start -> tokenizer ----------------> limits -> lark -> compile -> first masks -> Verdict -> exit
             (built once, shared)        '------------- may crash, hang or grow -------------'

    root ::= "<" num ">"          start: "<" NUM ">"
    num  ::= [0-9]{1,3}    ->     NUM: /[0-9]/{1,3}

The tokenizer is built once. Every job runs in a fork, which shares it and costs some milliseconds. A fork has
a limit of CPU time, of memory and of stack; each of them ends the fork and becomes a sentence for the client.
So a grammar that is slow, large or deadly holds up no other grammar, and leaves nothing behind.

The first masks are built on a stack of 1 MiB, half the stack of the engine's mask threads. The grammar is
compiled on at most 8 MiB, an eighth of the stack in the engine. Compiling is a function of the grammar, so a
grammar that passed here stays within its stack there. This module imports no torch. The loop has one thread,
so that a fork is safe.

GBNF, the notation of llama.cpp, is rewritten as lark. llguidance parses it; its rules are resolved here, in
time linear in their number. A rule becomes a terminal once all rules below it are. A rule that names itself
never gets there, and neither does ``root``.

Rejected: a pool of long-lived compilers (memory grows with what they have seen, and a crash costs a new
tokenizer, a second for a large vocabulary); threads (a stack overflow ends the process); the library's own
resolver of GBNF (quadratic in the depth of the grammar: 3,000 rules took 3.6 seconds).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import selectors
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from weft.text.grammar_limits import check_shape
from weft.text.worker_process import read_frame, write_frame

_LARK_START = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")
_CAMEL_CASE = re.compile(r"([a-z])([A-Z])")


def lark_of(grammar: str) -> str:
    """``grammar`` in lark; a text that is lark already comes back unchanged. Raises ValueError with the
    place that cannot be read."""
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
    """Links references to their rules and gives every rule its lark name, in place. Raises ValueError."""
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


JOBS_MAX = 4
"""Forks at once."""
COMPILE_STACK_BYTES = 8 << 20
MASK_STACK_BYTES = 1 << 20
_WALL_FACTOR = 4
"""A fork ends after this many times its CPU limit, however little it computes."""
_WALK_TOKENS = 8
_PRIORITY = 10


class Start(msgspec.Struct):
    """``seconds`` of CPU and ``memory_bytes`` are limits of one job. ``tokenizer``: text of its
    tokenizer.json."""

    tokenizer: str
    vocab_size: int
    eos_ids: list[int]
    seconds: int
    memory_bytes: int


class Verdict(msgspec.Struct):
    """``error`` is empty for a grammar that compiles. ``grammar`` is what to compile: the job's, in lark.
    ``size_bytes``: memory that the compiled grammar holds."""

    error: str = ""
    grammar: str = ""
    size_bytes: int = 0


class _Fork:
    """One job under way. ``output`` is what its pipe gave so far."""

    def __init__(self, number: int, pid: int, pipe: int, deadline_s: float) -> None:
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.deadline_s = deadline_s
        self.output = b""
        self.late = False


class _Worker:
    def __init__(self, jobs: IO[bytes], start: Start) -> None:
        """``jobs`` is unbuffered: the selector sees what was not read."""
        from llguidance import LLTokenizer

        self._jobs = jobs
        self._start = start
        self._tokenizer = LLTokenizer(start.tokenizer, n_vocab=start.vocab_size, eos_token=start.eos_ids)
        self._selector = selectors.DefaultSelector()
        self._selector.register(jobs, selectors.EVENT_READ)
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._forks: dict[int, _Fork] = {}
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        while True:
            while self._waiting and len(self._forks) < JOBS_MAX:
                self._fork(*self._waiting.popleft())
            for key, _ in self._selector.select(self._patience_s()):
                if key.data is None:
                    frame = read_frame(self._jobs)
                    if frame is None:
                        return
                    self._waiting.append(frame)
                else:
                    self._read(key.data)
            now = time.monotonic()
            for fork in self._forks.values():
                if now > fork.deadline_s and not fork.late:
                    fork.late = True
                    os.kill(fork.pid, signal.SIGKILL)

    def end(self) -> None:
        for fork in self._forks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(fork.pid, signal.SIGKILL)

    def _patience_s(self) -> float | None:
        if not self._forks:
            return None
        return max(min(fork.deadline_s for fork in self._forks.values()) - time.monotonic(), 0.01)

    def _fork(self, number: int, grammar: bytes) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _run_job(self._tokenizer, self._start, grammar, writing)
        os.close(writing)
        fork = _Fork(number, pid, reading, time.monotonic() + self._start.seconds * _WALL_FACTOR)
        self._forks[pid] = fork
        self._selector.register(reading, selectors.EVENT_READ, fork)

    def _read(self, fork: _Fork) -> None:
        part = os.read(fork.pipe, 1 << 16)
        if part:
            fork.output += part
            return
        self._selector.unregister(fork.pipe)
        os.close(fork.pipe)
        del self._forks[fork.pid]
        _, status = os.waitpid(fork.pid, 0)
        if status == 0:
            verdict = fork.output
        else:
            verdict = msgspec.msgpack.encode(Verdict(error=self._reason(fork, status)))
        write_frame(sys.stdout.buffer, fork.number, verdict)

    def _reason(self, fork: _Fork, status: int) -> str:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if fork.late or number in (signal.SIGXCPU, signal.SIGKILL):
            return f"takes more than {self._start.seconds} s to compile (limits.grammar_seconds)"
        if number == signal.SIGABRT or os.WIFEXITED(status):
            return f"needs more than {self._start.memory_bytes} bytes to compile (limits.grammar_memory)"
        return "is nested too deeply to be compiled"


def _run_job(tokenizer: Any, start: Start, grammar: bytes, pipe: int) -> None:
    """Never returns: the fork exits, or dies at one of its limits."""
    code = 1
    try:
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silent, descriptor)
        _limit(start)
        with os.fdopen(pipe, "wb") as stream:
            stream.write(msgspec.msgpack.encode(_verdict(tokenizer, grammar)))
        code = 0
    except BaseException:
        code = 1
    os._exit(code)


def _limit(start: Start) -> None:
    """``setrlimit`` below what the process has already is refused for no limit here."""
    os.nice(_PRIORITY)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    for kind, soft in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, start.seconds),
                       (resource.RLIMIT_STACK, COMPILE_STACK_BYTES),
                       (resource.RLIMIT_AS, pages * resource.getpagesize() + start.memory_bytes)):
        hard = resource.getrlimit(kind)[1]
        allowed = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        if kind != resource.RLIMIT_AS or pages:
            resource.setrlimit(kind, (allowed, hard))


def _verdict(tokenizer: Any, grammar_json: bytes) -> Verdict:
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
    prototype = LLMatcher(tokenizer, text, log_level=0)
    if prototype.is_error():
        return Verdict(error=str(prototype.get_error()))
    walker = prototype.deep_copy()
    reason = _on_small_stack(walker)
    if reason:
        return Verdict(error=reason)
    return Verdict(grammar=text, size_bytes=max(_used_bytes() - before_bytes, len(text)))


def _on_small_stack(walker: Any) -> str:
    """Builds the first masks of ``walker`` along some answer. Returns what went wrong."""
    errors: list[str] = []

    def walk() -> None:
        for _ in range(_WALK_TOKENS):
            mask = walker.compute_bitmask()
            if walker.is_error():
                errors.append(str(walker.get_error()))
                return
            word = next((at for at, byte in enumerate(mask) if byte), None)
            if word is None or walker.is_stopped():
                return
            walker.consume_token(word * 8 + (mask[word] & -mask[word]).bit_length() - 1)

    threading.stack_size(MASK_STACK_BYTES)
    thread = threading.Thread(target=walk)
    thread.start()
    thread.join()
    return errors[0] if errors else ""


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
        "keepcost")]


def _used_bytes() -> int:
    """Memory that this process holds from malloc; its largest resident size where the C library does not
    say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs = os.fdopen(0, "rb", buffering=0)
    frame = read_frame(jobs)
    if frame is None:
        return 0
    worker = _Worker(jobs, msgspec.msgpack.decode(frame[1], type=Start))
    try:
        worker.run()
    finally:
        worker.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
