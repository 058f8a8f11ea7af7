"""Work that is counted and not timed: the calls of a piece of code, in Python and into C, on a machine of any load.

with counted() as work:     profiles this thread
    parse_body(...)
assert work.calls <= ...
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Work:
    """``calls``: of functions in Python and in C, in the thread that counts."""

    calls: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Work]:
    work = Work()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        work.calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield work
    finally:
        sys.setprofile(None)
