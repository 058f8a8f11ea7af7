"""The heartbeat of the engine process, which shows whether the engine is alive, busy or stuck.

    engine process   loop thread   --- step_began_s --->  beat thread --Beat(step_s)--> events socket
    HTTP process     HeartMonitor  <--- any message from the engine is a sign of life

    silent    no message for ``stall_after_s``                   the process is stopped, swapped out or frozen
    stuck     one step takes STEP_FACTOR times as long           the device or a kernel hangs

A separate thread sends beats, so a long step does not silence the engine. Only steps have a bound: loading, sleeping
and waking may take any time. The monitor counts ``Silence`` in ticks of its own event loop, as links to other machines
do: a delay of this loop is not taken for a stall of the engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from weft.rpc.messages import Beat

STEP_FACTOR = 30
"""Bound of a step, in units of ``stall_after_s``: 5 minutes by default, as a first step compiles kernels."""
_BEAT_MAX_S = 1.0
_BEATS_PER_STALL = 5
_LATE_TICKS = 2
"""Most beats that a late tick counts."""


def beat_every_s(stall_after_s: float) -> float:
    """Return seconds between two beats, so that several fit into ``stall_after_s`` (0: no stall is ever
    reported)."""
    return min(_BEAT_MAX_S, stall_after_s / _BEATS_PER_STALL) if stall_after_s else _BEAT_MAX_S


class Silence:
    """Seconds since the last message of another process, counted in ticks of this event loop, one every ``beat_s``
    seconds. A late tick counts as two beats at most, so that a delay of this side is not taken for silence of the
    other."""

    def __init__(self, beat_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.beat_s = beat_s
        self.seconds = 0.0
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._ticked_s = self._clock()

    def end(self) -> None:
        """Note a message."""
        self.seconds = 0.0

    def tick(self) -> float:
        """Count a tick, and return the seconds."""
        now_s = self._clock()
        self.seconds += min(now_s - self._ticked_s, _LATE_TICKS * self.beat_s)
        self._ticked_s = now_s
        return self.seconds

    async def next_tick(self) -> float:
        await asyncio.sleep(self.beat_s)
        return self.tick()


class StepClock:
    """A clock of the running step: the loop thread writes its start, the beat thread reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None

    def begin(self) -> None:
        self._began_s = self._clock()

    def end(self) -> None:
        self._began_s = None

    @property
    def step_s(self) -> float:
        """Seconds in the running step; 0 between steps."""
        began_s = self._began_s
        return 0.0 if began_s is None else self._clock() - began_s


def start_beating(
    context: zmq.Context[zmq.Socket[bytes]], address: str, step_clock: StepClock, every_s: float
) -> Callable[[], None]:
    """Start the beat thread, with its own socket (a socket belongs to one thread). Call the result to end the
    thread."""
    stopped = threading.Event()

    def beat() -> None:
        socket = context.socket(zmq.PUSH)
        socket.connect(address)
        encoder = msgspec.msgpack.Encoder()
        while not stopped.wait(every_s):
            socket.send(encoder.encode(Beat(step_clock.step_s)))
        socket.close(linger=0)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


class HeartMonitor:
    """A watch on one engine process, in the HTTP process. ``stall_after_s`` 0: no stall is ever reported."""

    def __init__(self, stall_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence = Silence(beat_every_s(stall_after_s), clock)
        self.beat_s = self._silence.beat_s
        self._stall_after_s = stall_after_s
        self._step_s = 0.0
        self._stall_seen = asyncio.Event()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return self._silence.seconds

    @property
    def stall(self) -> str | None:
        """Reason why the engine counts as stalled; None if it does not."""
        if not self._stall_after_s:
            return None
        if self.silent_s > self._stall_after_s:
            return (
                f"the engine process has been silent for {self.silent_s:.1f} s; the bound is "
                f"{self._stall_after_s:g} s (limits.stall_after)"
            )
        step_s, bound_s = self._step_s + self.silent_s, STEP_FACTOR * self._stall_after_s
        if self._step_s and step_s > bound_s:
            return (
                f"the engine has been in one step for {step_s:.0f} s; the bound is {bound_s:g} s "
                f"({STEP_FACTOR} times limits.stall_after)"
            )
        return None

    async def stalled(self) -> str:
        """Wait for a stall, and return the reason."""
        while (reason := self.stall) is None:
            self._stall_seen.clear()
            await self._stall_seen.wait()
        return reason

    def sign_of_life(self, step_s: float = 0.0) -> None:
        """Note a message; ``step_s``: seconds of the running step, from a beat."""
        self._silence.end()
        self._step_s = step_s

    def tick(self) -> None:
        """Count a tick. Call this every ``beat_s`` seconds."""
        self._silence.tick()
        if self.stall is not None:
            self._stall_seen.set()

    async def watch(self) -> None:
        """Tick for ever, from now on."""
        self._silence.begin()
        while True:
            await asyncio.sleep(self.beat_s)
            self.tick()
