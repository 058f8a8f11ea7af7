"""``benchmarks.dialects`` on a few requests: every API of the server is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.dialects import PATHS, least

ROOT = Path(__file__).parents[2]


def test_every_dialect_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.dialects", "--requests", "1", "--tokens", "2", "--rounds", "1"]
    subprocess.run([*command, "--json", str(report)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    said = json.loads(report.read_text())
    assert set(said) == set(PATHS)
    assert all(row["request"] > 0 for row in said.values())


def test_a_slow_round_of_short_streams_makes_tokens_no_cheaper() -> None:
    rounds = [{"wall": 5.0, "many": 110.0, "one": 10.0}, {"wall": 7.0, "many": 120.0, "one": 300.0}]
    assert least(rounds, 11) == {"wall": 5.0, "token": 10.0}
