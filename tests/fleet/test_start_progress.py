"""What a starting engine shows where the output is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weft.fleet import start_progress
from weft.fleet.start_progress import StartProgress


def test_a_log_has_one_line_for_each_part_and_no_bar_that_stands_still() -> None:
    out = io.StringIO()
    progress = StartProgress(Console(file=out))
    for text in ("weights: █··· 5 % of 6 MiB", "weights: ██·· 50 % of 6 MiB", "weights: read in 2 s",
                 "speculation: measuring"):
        progress.show(text)
    assert out.getvalue().splitlines() == ["weights", "weights: read in 2 s", "speculation"]
    progress.end()
    progress.end()
    assert out.getvalue().splitlines()[2:] == ["speculation", "speculation: measuring"]


def test_a_part_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    progress = StartProgress(Console(file=out))
    monkeypatch.setattr(start_progress, "_LINES_APART_S", 0.0)
    progress.show("weights: █··· 5 % of 6 MiB")
    progress.show("weights: ██·· 50 % of 6 MiB")
    assert out.getvalue().splitlines() == ["weights", "weights: 5 % of 6 MiB", "weights: 50 % of 6 MiB"]
