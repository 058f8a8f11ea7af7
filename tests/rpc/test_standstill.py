"""Calls to sleep, pause and resume: with a scripted engine and a clock that is set by hand."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.engine.rig import Rig
from weft.errors import AsleepError, QueueFullError
from weft.request import Request, SamplingParams
from weft.rpc.messages import Pause, Reply, Resume, Sleep, SleepOutcome, UpdateWeights, Wake, WeightsOutcome
from weft.rpc.standstill import Standstill


class Queue:
    def __init__(self) -> None:
        self.rig = Rig()
        self.now_s = 0.0
        self.queue = Standstill(self.rig.core, clock=lambda: self.now_s)
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


def weights(reply: Reply) -> WeightsOutcome:
    assert reply.refusal is None
    return msgspec.msgpack.decode(reply.value, type=WeightsOutcome)


def request(name: str) -> Request:
    return Request(request_id=name, prompt_tokens=[5, 6, 7], sampling=SamplingParams(max_tokens=3))


def test_a_pause_keeps_what_runs_where_it_is() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=5)
    queue.rig.step()
    computed = queue.rig.core.computed_tokens
    [paused] = queue.queue.take(Pause(1, "keep", 10.0))
    assert weights(paused).paused
    assert not queue.rig.core.has_work
    queue.rig.submit("two", max_tokens=2)  # accepted, and waits
    assert queue.rig.core.step() == []
    assert queue.rig.core.computed_tokens == computed
    [resumed] = queue.queue.take(Resume(2))
    assert not weights(resumed).paused
    queue.rig.run()
    assert len(queue.rig.tokens("one")) == 5
    assert len(queue.rig.tokens("two")) == 2


def test_a_pause_that_waits_holds_new_requests_back_until_it_is_done() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=3)
    assert queue.queue.take(Pause(1, "wait", 10.0)) == []
    assert queue.queue.hold(7, request("held"))
    assert queue.queue.hold(8, request("given up"))
    queue.queue.cancel("given up")
    assert queue.queue.released() == []
    while queue.rig.core.live_count:
        queue.rig.step()
    [paused] = queue.queue.look()
    assert weights(paused).paused
    assert [number for number, _ in queue.queue.released()] == [7]
    assert not queue.queue.hold(9, request("later"))


def test_held_requests_have_a_bound() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=3)
    queue.queue.take(Pause(1, "wait", 10.0))
    limit = queue.rig.core.sizes.queue_max
    for number in range(limit):
        assert queue.queue.hold(number, request(f"held{number}"))
    with pytest.raises(QueueFullError, match=f"the limit is {limit}"):
        queue.queue.hold(limit, request("one too many"))


def test_a_pause_that_waited_long_enough_is_refused_and_lets_requests_in() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=50)
    queue.queue.take(Pause(1, "wait", 2.0))
    queue.queue.hold(7, request("held"))
    queue.now_s = 2.0
    [late] = queue.queue.look()
    assert late.refusal is not None
    assert late.refusal.status == 409
    assert not queue.rig.core.paused
    assert [number for number, _ in queue.queue.released()] == [7]


def test_a_pause_ends_what_runs_or_empties_the_cache_where_it_says_so() -> None:
    queue = Queue()
    queue.rig.submit("one", max_tokens=50)
    queue.rig.step()
    [emptied] = queue.queue.take(Pause(1, "keep", 0.0, flush=True))
    assert weights(emptied).flushed is not None
    assert queue.rig.core.memory.usage().leases == 0, "what runs gave its memory up"
    assert queue.rig.core.live_count == 1
    queue.queue.take(Resume(2))
    queue.rig.step()
    queue.queue.take(Pause(3, "abort", 0.0))
    assert queue.rig.core.live_count == 0
    queue.rig.run()


def test_an_engine_that_sleeps_is_not_paused_and_takes_no_weights() -> None:
    queue = Queue()
    queue.ask(1, mode=None)
    for command in (Pause(2, "keep", 0.0), UpdateWeights(3, "/nowhere", "", "keep", 0.0)):
        [refused] = queue.queue.take(command)
        assert refused.refusal is not None
        assert refused.refusal.code == "asleep"
