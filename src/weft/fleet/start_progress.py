"""The progress of an engine's start on a terminal or in a log: `weft serve` and `weft join`.

A terminal has one line that changes. A log gets a line when a part of the start begins, and another when the part is
over, if there is more to report:

    engine 0: weights of lfm2: 0 % of 681 MiB
    engine 1: weights of lfm2: 0 % of 681 MiB
    engine 0: weights of lfm2: 681 MiB read and packed in 1.2 s
    engine 0: memory: 3.0 GiB in 1358 frames

A long part gets further lines from time to time, since a bar that stays at 5 % would look like a start that hangs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape

from weft.logs import is_json

_log = logging.getLogger("weft.server")
_LINES_APART_S = 10.0
_BAR = str.maketrans("", "", "█·")


class ServiceConsole(Console):
    """The standard output of a serving process, which goes on when the reader of the pipe has left.

    rich ends the program when the pipe is closed (``weft serve | head -1``). In a task of an event loop that would be
    an exception which stops half of the server: the port stays taken, and signals do nothing. With a JSON log, each
    printed line becomes a record.
    """

    def print(self, *objects: Any, **settings: Any) -> None:
        if not is_json():
            super().print(*objects, **settings)
            return
        for line in " ".join(map(str, objects)).splitlines():
            if line.strip():
                _log.info(line.strip())

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # or the flush at the exit fails too


class StartProgress:
    """The progress of starting engines. ``show`` gets a line of an engine, ``part: progress``, which begins with
    ``engine N:`` if there are several engines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("", spinner="dots") if console.is_terminal and not is_json() else None
        self._shown_s = time.monotonic()
        self._parts: dict[str, str] = {}
        """Present part of the start, by engine."""
        self._latest: dict[str, str] = {}
        """Last line of each engine, if it is not printed yet."""

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))
            self._status.start()
            return
        engine, part = _engine_and_part(text)
        if part != self._parts.get(engine):
            self._print_latest(engine)
            self._parts[engine] = part
            self._print(text)
        else:
            self._latest[engine] = text
        if time.monotonic() - self._shown_s >= _LINES_APART_S:
            for waiting in list(self._latest):
                self._print_latest(waiting)

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
        for engine in list(self._latest):
            self._print_latest(engine)

    def say(self, text: str) -> None:
        """Print a separate line after the progress so far."""
        self.end()
        self._print(text)

    def _print_latest(self, engine: str) -> None:
        if engine in self._latest:
            self._print(self._latest.pop(engine))

    def _print(self, text: str) -> None:
        self._shown_s = time.monotonic()
        self._console.print(" ".join(text.translate(_BAR).split()), markup=False, highlight=False, soft_wrap=True)


def _engine_and_part(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(": ")
    if first.startswith("engine ") and rest:
        return first, rest.partition(":")[0]
    return "", text.partition(":")[0]
