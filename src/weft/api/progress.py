"""The progress bar of a program that waits for many answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_BAR_AFTER_S = 1.0


class AnswerBar:
    """A bar on stderr that appears when the work turns out to be long, and only on a terminal. ``total``
    answers; 0: no bar."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._due_s = time.monotonic() + _BAR_AFTER_S
        self._rich: Progress | None = None
        self._tokens_before = 0

    @property
    def due(self) -> bool:
        return bool(self._total) and (self._rich is not None or time.monotonic() >= self._due_s)

    def show(self, done: int, generated_tokens: int) -> None:
        """``done`` answers, and the tokens that the engine has generated since its start."""
        if self._rich is None:
            self._rich = _rich_progress()
            self._task = self._rich.add_task("", total=self._total)
            self._shown_at_s, self._tokens_before = time.monotonic(), generated_tokens
            self._rich.start()
        seconds = max(time.monotonic() - self._shown_at_s, 1e-3)
        rate = (generated_tokens - self._tokens_before) / seconds
        self._rich.update(self._task, completed=done, description=f"{rate:,.0f} tokens/s")

    def close(self) -> None:
        if self._rich is not None:
            self._rich.stop()


def _rich_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                    TextColumn("{task.description}"), console=console, transient=True,
                    disable=not console.is_terminal)
