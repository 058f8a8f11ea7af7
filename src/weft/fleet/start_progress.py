"""What a terminal shows of an engine that starts: `weft serve` and `weft join`."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape

_LINES_APART_S = 1.0


class StartProgress:
    """What a starting engine does: one line that changes in a terminal, else a line now and then, and the
    last one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("", spinner="dots") if console.is_terminal else None
        self._shown_s = -_LINES_APART_S
        self._held_back = ""

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(escape(text))
            self._status.start()
        elif time.monotonic() - self._shown_s >= _LINES_APART_S:
            self._shown_s = time.monotonic()
            self._print(text)
        else:
            self._held_back = text

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
        if self._held_back:
            self._print(self._held_back)

    def say(self, text: str) -> None:
        """A line of its own, after what was shown so far."""
        self.end()
        self._print(text)

    def _print(self, text: str) -> None:
        self._held_back = ""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
