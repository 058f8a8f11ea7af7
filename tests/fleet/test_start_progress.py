"""What a starting engine shows where the output is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weft.fleet import start_progress
from weft.fleet.start_progress import StartProgress


def shown(*texts: str) -> list[str]:
    out = io.StringIO()
    progress = StartProgress(Console(file=out))
    for text in texts:
        progress.show(text)
    progress.end()
    progress.end()
    return out.getvalue().splitlines()


def test_a_log_has_a_line_where_a_part_begins_and_one_where_there_is_more_to_say() -> None:
    assert shown(
        "weights: █··· 5 % of 6 MiB",
        "weights: ██·· 50 % of 6 MiB",
        "weights: read in 2 s",
        "memory: 3 GiB",
        "speculation: measuring",
    ) == ["weights: 5 % of 6 MiB", "weights: read in 2 s", "memory: 3 GiB", "speculation: measuring"]


def test_parts_of_several_engines_are_named_once_each() -> None:
    assert shown(
        "engine 0: weights: 0 %",
        "engine 1: weights: 0 %",
        "engine 0: weights: 50 %",
        "engine 1: weights: read",
        "engine 0: weights: read",
        "engine 0: memory: 3 GiB",
        "engine 1: memory: 3 GiB",
    ) == [
        "engine 0: weights: 0 %",
        "engine 1: weights: 0 %",
        "engine 0: weights: read",
        "engine 0: memory: 3 GiB",
        "engine 1: weights: read",
        "engine 1: memory: 3 GiB",
    ]


def test_a_part_that_takes_long_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_progress, "_LINES_APART_S", 0.0)
    assert shown("weights: █··· 5 % of 6 MiB", "weights: ██·· 50 % of 6 MiB", "weights: ██·· 60 % of 6 MiB") == [
        "weights: 5 % of 6 MiB",
        "weights: 50 % of 6 MiB",
        "weights: 60 % of 6 MiB",
    ]
