"""Turns of a server's event loop, measured where they are taken: seconds of the CPU of each callback.

    TURNS_FILE=FILE python -m tests.server.run_server ...      a line for each turn of over 5 ms: seconds, what ran

The loop is that of asyncio, whose callbacks run in Python. Seconds are those of the thread's CPU, so other work on the
machine does not count, and no pause of the garbage collector is another's.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import events
from pathlib import Path
from typing import Any

VARIABLE = "TURNS_FILE"
_NOTED_S = 0.005


def note_turns(file: str) -> None:
    """Write the long turns of every event loop of this process to ``file``."""
    import uvloop

    uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]
    run = events.Handle._run  # type: ignore[attr-defined]
    out = Path(file).open("a", buffering=1)  # noqa: SIM115 - as long as the process

    def measured(handle: Any) -> None:
        began_s = time.thread_time()
        run(handle)
        spent_s = time.thread_time() - began_s
        if spent_s > _NOTED_S:
            out.write(f"{spent_s:.4f} {_name_of(handle._callback)}\n")

    events.Handle._run = measured  # type: ignore[attr-defined]


def _name_of(callback: Any) -> str:
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return getattr(owner.get_coro(), "__qualname__", "a task")
    return getattr(callback, "__qualname__", repr(callback)[:80])


def longest_turn(file: Path, after: int) -> tuple[float, str]:
    """Return the longest turn from byte ``after`` of ``file`` on, and the callbacks in it."""
    turns = [line.split(" ", 1) for line in file.read_bytes()[after:].decode().splitlines()]
    return max(((float(seconds), name) for seconds, name in turns), default=(0.0, ""))
