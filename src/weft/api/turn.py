"""The turn to use an engine: one thread's at a time, and never twice inside itself.

An engine in a program has no thread of its own; the caller that waits for an answer steps it. Two ways lead
into the middle of a running step:

    another thread     calls the same engine                         -> BusyError, or it waits
    the same thread    the garbage collector closes a half read      -> ``mine`` says so, and the cancel waits
                       stream wherever it runs: inside a step, too      until the step is over

Rejected: one lock that every thread waits for (the thread that steps takes it again at once, and starves the
others); no guard (the second step finds half a plan, and the engine is lost).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weft.errors import BusyError


class Turn:
    """``take`` it around everything that changes the engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread has it, further up the stack."""
        return self._owner == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether some thread has it at this moment."""
        return self._lock.locked()

    @contextlib.contextmanager
    def take(self, *, wait: bool = False) -> Iterator[None]:
        """Raises BusyError where another thread has it, unless ``wait``."""
        assert not self.mine, "a step inside a step"
        if not self._lock.acquire(blocking=wait):
            raise BusyError("another thread is using this engine, which serves one at a time: put a lock "
                            "around the calls, or let the threads talk to a server (`weft serve`)")
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()
