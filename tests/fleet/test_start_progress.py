"""What a starting engine shows where the output is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from weft.fleet.start_progress import StartProgress


def test_the_last_line_is_always_shown() -> None:
    out = io.StringIO()
    progress = StartProgress(Console(file=out))
    for text in ("weights: 5 %", "weights: 50 %", "weights: read in 2 s"):
        progress.show(text)
    assert out.getvalue().splitlines() == ["weights: 5 %"]
    progress.end()
    progress.end()
    assert out.getvalue().splitlines() == ["weights: 5 %", "weights: read in 2 s"]
