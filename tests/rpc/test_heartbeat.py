"""The heartbeat: what counts as a stall, by a clock that is set by hand, and beats over a socket."""

from __future__ import annotations

import asyncio

import msgspec
import zmq

from weft.rpc.heartbeat import STEP_FACTOR, HeartMonitor, StepClock, beat_every_s, start_beating
from weft.rpc.messages import Beat, Report


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ticks(monitor: HeartMonitor, clock: Clock, seconds: float) -> None:
    for _ in range(round(seconds / monitor.beat_s)):
        clock.now_s += monitor.beat_s
        monitor.tick()


def test_silence_is_a_stall_after_the_bound_and_a_beat_ends_it() -> None:
    clock = Clock()
    monitor = HeartMonitor(10.0, clock)
    ticks(monitor, clock, 10.0)
    assert monitor.stall is None
    ticks(monitor, clock, 1.0)
    assert monitor.silent_s == 11.0
    assert "silent for 11.0 s" in str(monitor.stall)
    monitor.sign_of_life()
    assert (monitor.silent_s, monitor.stall) == (0.0, None)


def test_a_step_that_computes_is_a_stall_only_past_a_bound_of_its_own() -> None:
    clock = Clock()
    monitor = HeartMonitor(10.0, clock)
    monitor.sign_of_life(step_s=STEP_FACTOR * 10.0 - 1.0)
    assert monitor.stall is None
    monitor.sign_of_life(step_s=STEP_FACTOR * 10.0 + 1.0)
    assert "one step for 301 s" in str(monitor.stall)


def test_a_busy_http_process_does_not_blame_the_engine() -> None:
    """Its own event loop was held up for a minute: the beats wait in the socket."""
    clock = Clock()
    monitor = HeartMonitor(10.0, clock)
    clock.now_s += 60.0
    monitor.tick()
    assert monitor.stall is None
    assert monitor.silent_s == 2 * monitor.beat_s


def test_without_a_bound_there_is_no_stall() -> None:
    clock = Clock()
    monitor = HeartMonitor(0.0, clock)
    ticks(monitor, clock, 1000.0)
    assert monitor.stall is None
    assert beat_every_s(0.0) == 1.0


def test_a_waiter_is_woken_by_the_stall() -> None:
    clock = Clock()
    monitor = HeartMonitor(1.0, clock)

    async def wait() -> str:
        waiter = asyncio.create_task(monitor.stalled())
        await asyncio.sleep(0)
        assert not waiter.done()
        ticks(monitor, clock, 2.0)
        return await asyncio.wait_for(waiter, 1)

    assert "limits.stall_after" in asyncio.run(wait())


def test_beats_say_how_long_the_step_has_taken() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    events = context.socket(zmq.PULL)
    events.bind("inproc://beats")
    clock = Clock()
    step_clock = StepClock(clock)
    stop = start_beating(context, "inproc://beats", step_clock, 0.01)

    def next_beat() -> Beat:
        assert events.poll(5000)
        beat = msgspec.msgpack.decode(events.recv(), type=Report)
        assert isinstance(beat, Beat)
        return beat

    assert next_beat().step_s == 0.0
    step_clock.begin()
    clock.now_s = 3.0
    while next_beat().step_s != 3.0:
        pass
    step_clock.end()
    while next_beat().step_s:
        pass
    stop()
    events.close(0)
    context.term()
