"""Calls to sleep that wait: with a scripted engine and a clock that is set by hand."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.engine.rig import Rig
from weft.errors import AsleepError
from weft.rpc.engine_process import SleepQueue
from weft.rpc.messages import Reply, Sleep, SleepOutcome, Wake


class Queue:
    def __init__(self) -> None:
        self.rig = Rig()
        self.now_s = 0.0
        self.queue = SleepQueue(self.rig.core, clock=lambda: self.now_s)
        self._replies: list[Reply] = []

    def ask(self, number: int, mode: str | None = "wait", level: int = 1, timeout_s: float = 10.0) -> None:
        self._replies += self.queue.take(Sleep(number, level, mode, timeout_s))  # type: ignore[arg-type]

    def wake(self, number: int) -> None:
        self._replies += self.queue.take(Wake(number, None))

    def replies(self) -> list[Reply]:
        replies, self._replies = [*self._replies, *self.queue.look()], []
        return replies

    @property
    def level(self) -> int:
        return self.rig.core.sleep_state.level


def outcome(reply: Reply) -> SleepOutcome:
    assert reply.refusal is None
    return msgspec.msgpack.decode(reply.value, type=SleepOutcome)


def test_a_sleep_that_waits_comes_with_the_last_answer_and_accepts_no_request_until_then() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=3)
    queue.ask(7)
    while queue.rig.core.live_count:
        assert queue.replies() == []
        with pytest.raises(AsleepError, match="goes to sleep"):
            queue.queue.check_open()
        queue.rig.step()
    [fell] = queue.replies()
    assert (fell.number, outcome(fell).state.level) == (7, 1)
    queue.rig.run()
    assert len(queue.rig.tokens("one")) == 3
    queue.queue.check_open()  # the engine itself refuses from now on


def test_a_sleep_that_waited_long_enough_is_refused_and_requests_are_taken_again() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=50)
    queue.ask(1, timeout_s=2.0)
    queue.rig.step()
    queue.now_s = 1.9
    assert queue.replies() == []
    queue.now_s = 2.0
    [late] = queue.replies()
    assert late.refusal is not None
    assert late.refusal.status == 409
    assert "1 sequence" in late.refusal.message
    assert "after 2 s" in late.refusal.message
    assert queue.level == 0
    queue.queue.check_open()
    queue.rig.run()
    assert len(queue.rig.tokens("one")) == 50


def test_one_call_waits_at_a_time_and_waking_calls_it_off() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=50)
    queue.ask(1)
    queue.ask(2)
    [second] = queue.replies()
    assert second.number == 2
    assert second.refusal is not None
    assert "another call waits" in second.refusal.message
    queue.wake(3)
    off, woken = queue.replies()
    assert (off.number, woken.number) == (1, 3)
    assert off.refusal is not None
    assert off.refusal.status == 409
    assert woken.refusal is None
    queue.queue.check_open()


def test_a_call_that_does_not_wait_is_answered_at_once() -> None:
    queue = Queue()
    queue.rig.submit("one")
    queue.ask(1, mode=None)
    [refused] = queue.replies()
    assert refused.refusal is not None
    assert refused.refusal.status == 409
    queue.ask(2, mode="abort", level=2)
    [fell] = queue.replies()
    assert outcome(fell).state.level == 2
    assert outcome(fell).flushed is not None
    queue.ask(3, level=9)
    [wrong] = queue.replies()
    assert wrong.refusal is not None
    assert wrong.refusal.status == 400
    assert queue.level == 2
