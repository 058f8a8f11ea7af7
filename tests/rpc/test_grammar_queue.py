"""Grammars are compiled beside the steps: nobody waits for another's, and a bad one never runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.rpc.test_engine_loop import PROMPT, Loop
from tests.server.scripted_engine import build, write_model_directory
from weft.adapters import Adapter
from weft.config import EngineConfig
from weft.engine.grammars import GrammarCompiler, TokenGrammar
from weft.errors import QueueFullError, RequestError
from weft.request import Grammar, Request, SamplingParams
from weft.rpc.messages import Cancel
from weft.rpc.queues import JOBS_MAX, AdapterQueue, GrammarQueue
from weft.text.grammars import regex_grammar


def constrained(name: str, grammar: Grammar) -> Request:
    return Request(
        request_id=name, prompt_tokens=PROMPT, sampling=SamplingParams(temperature=0, max_tokens=4, grammar=grammar)
    )


class SlowCompiler(GrammarCompiler):
    """Compiles when it is let go."""

    def __init__(self, real: GrammarCompiler) -> None:
        super().__init__(real._read_tokenizer, real._eos_ids, real._vocab_size)
        self.go = threading.Event()
        self.started = threading.Event()

    def build(self, grammar: Grammar) -> TokenGrammar:
        self.started.set()
        assert self.go.wait(30)
        return super().build(grammar)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Loop, SlowCompiler]]:
    made = build(EngineConfig(model=str(write_model_directory(tmp_path))), on_progress=lambda text: None)
    compiler = made.core.grammars = SlowCompiler(made.core.grammars)
    loop = Loop(made.core)
    yield loop, compiler
    compiler.go.set()
    loop.close()


def test_others_run_while_a_grammar_is_compiled(slow: tuple[Loop, SlowCompiler]) -> None:
    loop, compiler = slow
    loop.send(constrained("held", regex_grammar("a+", field="f")))
    assert compiler.started.wait(10)
    loop.submit("free", PROMPT, 20)
    reports = loop.reports(until="free")
    assert [name for report in reports for name in loop.accepted(report)] == ["free"]
    compiler.go.set()
    accepted = [name for report in loop.reports(until="held") for name in loop.accepted(report)]
    assert accepted == ["held"]


def test_a_bad_grammar_is_rejected_in_the_compilers_words_and_needs_no_step(slow: tuple[Loop, SlowCompiler]) -> None:
    loop, compiler = slow
    compiler.go.set()
    loop.send(constrained("bad", regex_grammar("(a", field="guided_regex")))
    [(name, refusal)] = loop.refused(loop.next_report()).items()
    assert (name, refusal.status, refusal.param) == ("bad", 400, "guided_regex")
    assert "unclosed" in refusal.message


def test_a_request_that_is_cancelled_while_its_grammar_is_compiled_never_runs(slow: tuple[Loop, SlowCompiler]) -> None:
    loop, compiler = slow
    loop.send(constrained("gone", regex_grammar("a+", field="f")))
    assert compiler.started.wait(10)
    loop.tell(Cancel("gone"))
    loop.submit("free", PROMPT, 4)
    reports = loop.reports(until="free")
    compiler.go.set()
    loop.submit("last", PROMPT, 4)
    reports += loop.reports(until="last")
    news = {
        *(name for report in reports for name in loop.accepted(report)),
        *(event.request_id for report in reports for event in report.events),
    }
    assert news == {"free", "last"}


def test_a_known_grammar_does_not_wait_and_what_waits_is_bounded(slow: tuple[Loop, SlowCompiler]) -> None:
    compiler = slow[1]
    queue = GrammarQueue(compiler, 2)
    known, new = regex_grammar("a", field="f"), regex_grammar("b", field="f")
    compiler.go.set()
    compiler.compile(known)
    compiler.go.clear()
    assert not queue.take(constrained("1", known))
    assert not queue.take(Request(request_id="2", prompt_tokens=PROMPT, sampling=SamplingParams()))
    assert queue.take(constrained("3", new))
    assert queue.take(constrained("4", new))
    with pytest.raises(QueueFullError, match=r"limits\.max_queued_requests"):
        queue.take(constrained("5", new))
    queue.cancel("4")
    queue.cancel("unknown")
    assert queue.take(constrained("6", new))
    assert list(queue.ready()) == []
    compiler.go.set()
    queue.close()


class HeldWork:
    """Compiles grammars and reads adapters when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[object] = []

    def find(self, one: object) -> None:
        return None

    def build(self, one: object) -> Any:
        self.begun.append(one)
        assert self.go.wait(30)

    read = build


@pytest.mark.parametrize("kind", [GrammarQueue, AdapterQueue])
def test_a_queue_that_is_closed_begins_nothing_more(kind: type[GrammarQueue | AdapterQueue]) -> None:
    work: Any = HeldWork()
    queue = kind(work, 100)
    queue.close()  # nothing has come yet
    queue = kind(work, 100)
    for number in range(JOBS_MAX + 3):
        request = constrained(str(number), regex_grammar("a" * (number + 1), field="f"))
        if kind is AdapterQueue:
            request = msgspec.structs.replace(request, adapter=Adapter(name="a", directory="", digest=str(number)))
        assert queue.take(request)
    while not work.begun:
        time.sleep(0.001)
    queue.close()
    work.go.set()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(("grammars", "adapters"))]
    for thread in threads:
        thread.join(30)
    assert 0 < len(work.begun) <= JOBS_MAX


def test_an_adapter_that_finds_no_room_waits_alone() -> None:
    """Those that were read after it are served meanwhile, and one that cannot be read is answered."""

    def read(adapter: Adapter) -> str:
        if adapter.name == "broken":
            raise RequestError("no adapter", param="model")
        return adapter.name

    full = {"large"}
    pool: Any = SimpleNamespace(find=lambda adapter: False, read=read, keep=lambda name: name not in full)
    queue = AdapterQueue(pool, 100)
    for name in ("large", "broken", "small"):
        request = constrained(name, regex_grammar("a", field="f"))
        assert queue.take(msgspec.structs.replace(request, adapter=Adapter(name=name, directory="", digest=name)))
    while not all(reading.read.done() for reading in queue._readings.values()):
        time.sleep(0.001)

    def answered() -> list[tuple[list[str], str]]:
        return [([one.request_id for one in requests], str(error or "")) for _, requests, error in queue.answers()]

    assert answered() == [(["broken"], "no adapter"), (["small"], "")]
    assert queue.busy
    full.clear()
    assert answered() == [(["large"], "")]
    assert not queue.busy
    queue.close()
