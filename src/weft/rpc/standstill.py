"""Calls that stop the engine's steps: to sleep and wake, to pause and resume, and to replace the weights.

    mode            treatment of live sequences
    none            Sleep: refused, with their count and the modes
    wait            steps go on until the last one has ended; refused after the timeout. Meanwhile new requests are
                    refused (Sleep), or held back until the call is done
    abort           all are ended
    keep            Pause: they stay where they are. UpdateWeights: they are preempted, and computed again

    Wake, Resume    at once; a waiting call is then refused

Everything happens between two steps. A call that reads weights takes long; the thread of the heartbeat goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.engine.engine import EngineCore
from weft.engine.sleeper import Sleeper, busy
from weft.engine.stats import Flushed, check_level, check_parts
from weft.errors import AsleepError, BusyError, CheckpointError, QueueFullError, WeftError
from weft.request import Request
from weft.rpc.messages import Pause, Reply, Resume, Sleep, SleepOutcome, UpdateWeights, Wake, WeightsOutcome

Call = Sleep | Pause | UpdateWeights


class Standstill:
    """Calls that wait for the engine's steps to stop. ``clock`` returns seconds. ``take`` and ``look`` return the
    replies that are ready."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._sleeper = Sleeper(core)
        self._clock = clock
        self.waits = False
        """Whether a call waits for live sequences, so that new requests wait too."""
        self._waiting: tuple[Call, float] | None = None
        self._held: dict[str, tuple[int, Request]] = {}

    # ------------------------------------------------------------------ requests

    def check_open(self) -> None:
        """Raise AsleepError while a sleep waits for live sequences. An engine that sleeps refuses by itself."""
        if self._waiting is not None and isinstance(self._waiting[0], Sleep):
            raise AsleepError(
                "the engine goes to sleep once running requests have ended, and takes no new ones", code="asleep"
            )

    def hold(self, number: int, request: Request) -> bool:
        """Return whether ``request`` is held back, because a call waits for the requests before it. Raise AsleepError
        if it waits to sleep, QueueFullError (law L11)."""
        self.check_open()
        if self._waiting is None:
            return False
        if len(self._held) >= self._core.sizes.queue_max:
            raise QueueFullError(
                f"{len(self._held)} requests wait for the engine to be paused, or to have other weights; the limit "
                f"is {self._core.sizes.queue_max} (limits.max_queued_requests). Try again later",
                param="limits.max_queued_requests",
                code="queue_full",
            )
        self._held[request.request_id] = number, request
        return True

    def released(self) -> list[tuple[int, Request]]:
        """Return the requests that are no longer held back."""
        if self._waiting is not None or not self._held:
            return []
        released = list(self._held.values())
        self._held.clear()
        return released

    def cancel(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def forget(self) -> None:
        """Drop a waiting call and all held-back requests, because their caller has gone."""
        self._wait_for(None)
        self._held.clear()

    # ------------------------------------------------------------------ calls

    def take(self, command: Call | Wake | Resume) -> list[Reply]:
        try:
            if isinstance(command, Wake):
                check_parts(command.tags)
                refused = self._refuse_waiting("a call to wake up came before running requests had ended")
                return [*refused, self._wake(command)]
            if isinstance(command, Resume):
                refused = self._refuse_waiting("a call to resume came before running requests had ended")
                self._core.paused = False
                return [*refused, self._weights(command.number)]
            if isinstance(command, Sleep):
                check_level(command.level)
            else:
                self._core.sleep_state.check_awake()
            if self._waiting is not None:
                raise BusyError("another call waits for running requests to end", code="busy")
            if command.mode == "wait" and self._core.live_count and not self._core.paused:
                self._wait_for(command)
                return []
            return [self._done(command)]
        except WeftError as error:
            return [Reply.refused(command.number, error)]

    def _wait_for(self, command: Call | None) -> None:
        self._waiting = None if command is None else (command, self._clock() + command.timeout_s)
        self.waits = command is not None

    def look(self) -> list[Reply]:
        """Return the replies that are ready, between two steps: the live sequences have ended, or the timeout has
        passed."""
        if self._waiting is None:
            return []
        command, deadline_s = self._waiting
        if not self._core.live_count:
            self._wait_for(None)
            return [self._done(command)]
        if self._clock() >= deadline_s:
            self._wait_for(None)
            return [Reply.refused(command.number, busy(self._core.live_count, command.timeout_s))]
        return []

    def _done(self, command: Call) -> Reply:
        aborts = command.mode == "abort"
        try:
            if isinstance(command, Sleep):
                slept = self._sleeper.sleep(command.level, abort=aborts)
                return Reply.of(command.number, SleepOutcome(state=self._sleeper.state, flushed=slept))
            if isinstance(command, Pause):
                return self._weights(command.number, self._sleeper.pause(abort=aborts, flush=command.flush))
            flushed = self._sleeper.refit(command.directory, command.version, abort=aborts)
            return self._weights(command.number, flushed)
        except WeftError as error:
            return Reply.refused(command.number, error)
        except OSError as error:
            failed = CheckpointError(f"{error.filename}: cannot be read: {error.strerror}", param="path")
            return Reply.refused(command.number, failed)

    def _wake(self, command: Wake) -> Reply:
        try:
            self._sleeper.wake_up(command.tags)
        except WeftError as error:
            return Reply.refused(command.number, error)
        return Reply.of(command.number, SleepOutcome(state=self._sleeper.state))

    def _weights(self, number: int, flushed: Flushed | None = None) -> Reply:
        return Reply.of(number, WeightsOutcome(weights=self._core.weights, paused=self._core.paused, flushed=flushed))

    def _refuse_waiting(self, why: str) -> list[Reply]:
        if self._waiting is None:
            return []
        command, _ = self._waiting
        self._wait_for(None)
        return [Reply.refused(command.number, BusyError(why, code="busy"))]
