"""Waits of the host for an event of a GPU, with a deadline.

    event recorded behind work --query, pause, query, ...--> done, or DeviceTimeoutError after WAIT_MAX_S

``event.synchronize()`` has no deadline: a kernel that never ends, or a card that fell off the bus, would hang
the engine until an operator kills it. With a deadline the engine ends with a reason, and a supervisor can
start it again. Rejected: a thread that watches the waits (it could report the hang, and not end it).
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

WAIT_MAX_S = 300.0
"""Far longer than any step, and than the copies of one."""
_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 1e-3
_PAUSE_SHARE = 0.02


class DeviceEvent(Protocol):
    """``torch.cuda.Event``, recorded."""

    def query(self) -> bool:
        """Whether all work before it is done."""
        ...


class DeviceTimeoutError(RuntimeError):
    """The device did not finish in time."""


def wait_for(event: DeviceEvent, *, deadline_s: float = WAIT_MAX_S,
             clock: Callable[[], float] = time.monotonic,
             sleep: Callable[[float], None] = time.sleep) -> None:
    """Raises DeviceTimeoutError, and what ``query`` raises for an error of the device."""
    if event.query():
        return
    began_s = clock()
    # The pause grows with the time waited: a wait is at most 2 % too long, or the 0.1 ms of a wake-up.
    while not event.query():
        waited_s = clock() - began_s
        if waited_s > deadline_s:
            raise DeviceTimeoutError(
                f"the GPU has not finished its work in {deadline_s:g} s: a kernel hangs, or the card is "
                "lost; the driver's log (dmesg) may say which")
        sleep(min(_PAUSE_MAX_S, max(_PAUSE_MIN_S, _PAUSE_SHARE * waited_s)))
