"""What a terminal or a log shows of an engine that starts: `weft serve` and `weft join`.

A terminal has one line that changes. A log has a line when a part of the start begins, one when it is over,
and one now and then between them. A bar at 5 % that never moves again would look like a start that hangs.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape

_LINES_APART_S = 10.0
_BAR = str.maketrans("", "", "█·")


class StartProgress:
    """``show`` gets what the engine does: ``part: how far``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("", spinner="dots") if console.is_terminal else None
        self._shown_s = time.monotonic()
        self._part = self._latest = ""

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))
            self._status.start()
            return
        part = text.partition(":")[0]
        if part != self._part:
            self._print_latest()
            self._part = part
            self._print(part)
        if text != part:
            self._latest = text
        if time.monotonic() - self._shown_s >= _LINES_APART_S:
            self._print_latest()

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
        self._print_latest()

    def say(self, text: str) -> None:
        """A line of its own, after what was shown so far."""
        self.end()
        self._print(text)

    def _print_latest(self) -> None:
        if self._latest:
            self._shown_s = time.monotonic()
            self._print(" ".join(self._latest.translate(_BAR).split()))
        self._latest = ""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
