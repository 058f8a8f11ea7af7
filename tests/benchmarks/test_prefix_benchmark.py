"""The arithmetic of the prefix benchmark, and one round of it on a checkpoint made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prefix import Pair, Run, alternating, main, spread


def test_who_is_first_alternates() -> None:
    assert alternating(3) == [("off", "on"), ("on", "off"), ("off", "on")]


def test_a_spread_is_the_median_between_the_least_and_the_most() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.00 [1.00-3.00]"
    assert spread([1.5]) == "1.50"


def test_ratios_are_taken_round_by_round() -> None:
    pair = Pair(
        "x",
        10,
        off=[Run(seconds=4.0, answers=[[1], [2]]), Run(seconds=9.0, answers=[[1], [2]])],
        on=[Run(seconds=2.0, answers=[[1], [2]]), Run(seconds=3.0, answers=[[1], [5]])],
    )
    assert pair.ratios(lambda run: run.seconds) == [2.0, 3.0]
    assert pair.answers_equal == 0.75


def test_the_cache_saves_what_the_requests_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rounds.json"
    sizes = {"requests": 4, "shared": 200, "own": 20, "out": 2, "turns": 2, "rounds": 1, "threads": 1}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert main(["--checkpoint", "tiny", "--memory", "16MB", "--json", str(out), *flags]) == 0
    assert "medians of 1 rounds" in capsys.readouterr().out
    found = json.loads(out.read_text())
    for pair in found["shared"]:
        [off], [on] = pair["off"], pair["on"]
        assert off["computed_tokens"] == 4 * (220 + 1)
        assert on["computed_tokens"] <= 220 + 1 + 3 * (220 - 192 + 1) + 192, "at most the second pays again"
    second_turn = found["conversation"][1]
    assert second_turn["on"][0]["computed_tokens"] == 20 + 1 + 1, "what the turn adds, its token, one before"
    assert second_turn["off"][0]["computed_tokens"] == second_turn["prompt_tokens"] + 1
