"""The loop of the engine process, in a thread, on sockets inside this process."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.server.scripted_engine import build, write_model_directory
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams, TokenEvent
from weft.rpc.child import read_launch
from weft.rpc.engine_process import EngineLoop
from weft.rpc.messages import Cancel, Command, Launch, Refusal, StepReport, Stop, Submit
from weft.rpc.recorder import Recorder

PROMPT = [104, 105]


class Loop:
    """An EngineLoop in a thread. ``audits`` counts; ``error`` is what the loop raised."""

    def __init__(self, core: EngineCore, recorder: Recorder | None = None) -> None:
        self.core = core
        self._recorder = recorder
        self._submitted: list[str] = []
        self.audits = 0
        self.audited = threading.Event()
        self.error: Exception | None = None
        self.audit = core.audit
        core.audit = self.note_audit  # type: ignore[method-assign]
        context = zmq.Context.instance()
        self._commands, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._events, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        commands.bind(f"inproc://commands-{id(self)}")
        self._commands.connect(f"inproc://commands-{id(self)}")
        self._events.bind(f"inproc://events-{id(self)}")
        events.connect(f"inproc://events-{id(self)}")
        self._ends = (commands, events)
        self.thread = threading.Thread(target=self._run, args=(commands, events))
        self.thread.start()

    def note_audit(self) -> None:
        self.audit()
        self.audits += 1
        self.audited.set()

    def hold_steps_until_waiting(self, count: int) -> None:
        """No step does anything before ``count`` sequences wait. To be called before the first request."""
        step, core = self.core.step, self.core

        def held() -> list[TokenEvent]:
            if core.stats().waiting < count:
                return []
            core.step = step  # type: ignore[method-assign]
            return step()

        core.step = held  # type: ignore[method-assign]

    def tell(self, command: Command) -> None:
        self._commands.send(msgspec.msgpack.encode(command))

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        self.send(Request(request_id=request_id, prompt_tokens=prompt, sampling=sampling))

    def send(self, request: Request) -> None:
        self.tell(Submit(len(self._submitted), request))
        self._submitted.append(request.request_id)

    def accepted(self, report: StepReport) -> list[str]:
        """Requests that ``report`` accepts."""
        return [self._submitted[reply.number] for reply in report.replies if reply.refusal is None]

    def refused(self, report: StepReport) -> dict[str, Refusal]:
        return {self._submitted[reply.number]: reply.refusal for reply in report.replies if reply.refusal is not None}

    def reports(self, until: str) -> list[StepReport]:
        """Up to the one that ends the request ``until``."""
        reports: list[StepReport] = []
        while True:
            reports.append(self.next_report())
            if any(event.finish_reason and event.request_id == until for event in reports[-1].events):
                return reports

    def next_report(self) -> StepReport:
        assert self._events.poll(5000)
        return msgspec.msgpack.decode(self._events.recv(), type=StepReport)

    def close(self) -> None:
        if self.thread.is_alive():
            self.tell(Stop())
        self.thread.join(5)
        for socket in (self._commands, self._events, *self._ends):
            socket.close(0)

    def _run(self, commands: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
        try:
            EngineLoop(self.core, commands, events, self._recorder).run()
        except Exception as error:
            self.error = error


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    directory = write_model_directory(tmp_path)
    made = build(EngineConfig(model=str(directory)), on_progress=lambda text: None)
    running = Loop(made.core)
    yield running
    running.close()


def test_a_request_is_accepted_before_its_first_token_and_a_step_is_one_message(loop: Loop) -> None:
    loop.hold_steps_until_waiting(2)  # else "a" may end before "b" comes, and no step has both
    loop.submit("a", PROMPT, 40)
    loop.submit("b", PROMPT, 40)
    reports = loop.reports(until="b")
    news = [
        name for report in reports for name in (*loop.accepted(report), *(event.request_id for event in report.events))
    ]
    assert news.index("a") == 0
    assert sum(len(report.events) for report in reports) == 80
    assert max(len(report.events) for report in reports) == 2
    assert all(len(report.events) == len({event.request_id for event in report.events}) for report in reports)
    assert sum(size for report in reports for size in report.step_tokens) == 2 * (len(PROMPT) + 39)


def test_a_rejection_names_the_request_and_the_field_and_needs_no_step(loop: Loop) -> None:
    loop.submit("bad", [], 4)
    report = loop.next_report()
    [(name, refusal)] = loop.refused(report).items()
    assert (name, refusal.status, refusal.param) == ("bad", 400, "prompt")
    assert report.events == []


def test_the_last_stats_of_a_busy_spell_say_idle(loop: Loop) -> None:
    loop.submit("a", PROMPT, 3)
    loop.reports(until="a")
    while (stats := loop.next_report().stats) is None or stats.running:
        pass
    assert (stats.running, stats.waiting, stats.memory.leases) == (0, 0, 0)


def test_the_memory_is_audited_once_after_each_busy_spell(loop: Loop) -> None:
    assert loop.audits == 0
    for spell in (1, 2):
        loop.audited.clear()
        loop.submit("a", PROMPT, 3)
        loop.reports(until="a")
        assert loop.audited.wait(5)
        assert loop.audits == spell


def test_a_failed_audit_ends_the_loop(loop: Loop) -> None:
    def failing() -> None:
        raise AssertionError("page 3 has two owners")

    loop.audit = failing
    loop.submit("a", PROMPT, 3)
    loop.reports(until="a")
    loop.thread.join(5)
    assert "page 3" in str(loop.error)


def test_a_cancel_ends_one_sequence_or_all_and_an_unknown_one_is_nothing(loop: Loop) -> None:
    loop.tell(Cancel("nobody"))
    loop.submit("a", PROMPT, 2000)
    while not loop.next_report().events:
        pass
    loop.tell(Cancel("a", 0))
    assert loop.reports(until="a")[-1].events[-1].finish_reason == "cancelled"


def test_a_failing_step_is_raised_after_its_events_were_sent(loop: Loop) -> None:
    loop.submit("a", [ord(c) - 33 for c in "crash"], 5)
    event = loop.reports(until="a")[-1].events[-1]
    assert event.finish_reason == "error"
    loop.thread.join(5)
    assert "fell off the bus" in str(loop.error)


def test_the_launch_message_is_read_whole_or_not_at_all() -> None:
    launch = Launch(factory="m:f", config={"model": "x" * 100_000}, folder="f")
    body = msgspec.msgpack.encode(launch)
    framed = len(body).to_bytes(8, "little") + body
    assert read_launch(io.BytesIO(framed), Launch) == launch
    for cut in (0, 4, 8, len(framed) - 1):
        with pytest.raises(EOFError):
            read_launch(io.BytesIO(framed[:cut]), Launch)
