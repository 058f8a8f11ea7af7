"""A spinner on stderr while something starts; silent where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class Waiting:
    """Call it with the seconds so far, or say what is being done; ``done`` ends it and may come twice."""

    def __init__(self, what: str, status: Status) -> None:
        self._what = what
        self._status = status

    def __call__(self, seconds: float) -> None:
        self._status.update(f"{self._what} ({seconds:.0f} s)")

    def say(self, line: str) -> None:
        self._status.update(escape(line))

    def done(self) -> None:
        self._status.stop()


@contextmanager
def waiting(what: str) -> Iterator[Waiting]:
    with Console(stderr=True).status(what) as status:
        yield Waiting(what, status)
