"""``benchmarks.dialects`` on a few requests: every API of the server is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.dialects import PATHS

ROOT = Path(__file__).parents[2]


def test_every_dialect_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.dialects", "--requests", "1", "--tokens", "2", "--rounds", "1"]
    subprocess.run([*command, "--json", str(report)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    said = json.loads(report.read_text())
    assert set(said) == set(PATHS)
    assert all(row["request"] > 0 for row in said.values())
