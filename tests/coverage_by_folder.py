"""Statements of each folder of weft that a set of tests runs: ``make coverage ARGS="tests/unit/memory tests/sim"``.

Every process that the tests start is measured, by coverage.py's patch of subprocesses ([tool.coverage.run] in
pyproject.toml). A statement that is run is not thereby checked; ``make mutants`` asks that question.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.arch.rules import ROOT, area_of

DATA = ROOT / "build" / "coverage"
"""Folder of the measured data, as ``data_file`` in pyproject.toml has it."""


def folder_rows(report: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return folder, statements and run statements of each folder in coverage.py's JSON report, and their sum."""
    folders: dict[str, tuple[int, int]] = {}
    for path, measured in report["files"].items():
        summary = measured["summary"]
        statements, run = folders.get(area_of(path), (0, 0))
        folders[area_of(path)] = statements + summary["num_statements"], run + summary["covered_lines"]
    rows = [(folder, *counts) for folder, counts in sorted(folders.items())]
    return [*rows, ("sum", sum(row[1] for row in rows), sum(row[2] for row in rows))]


def table_of(rows: Iterable[tuple[str, int, int]]) -> str:
    """Return ``rows`` as lines of text with the share of statements that ran, in percent."""
    lines = [f"{'folder':<28} {'statements':>10} {'run':>10} {'%':>6}"]
    lines += [
        f"{folder:<28} {statements:>10,} {run:>10,} {100 * run / max(statements, 1):>6.1f}"
        for folder, statements, run in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Run pytest with the given arguments under coverage.py, and print the table. Return pytest's exit code."""
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True)
    # Events of the interpreter (3.12 and newer) cost a fraction of a trace function.
    cores = {"COVERAGE_CORE": "sysmon"} if sys.version_info >= (3, 12) else {}
    coverage = [sys.executable, "-m", "coverage"]
    tests = subprocess.run(
        [*coverage, "run", "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]],
        cwd=ROOT,
        env={**os.environ, **cores},
    )
    subprocess.run([*coverage, "combine", "--quiet"], cwd=ROOT, check=True)
    report = DATA / "report.json"
    subprocess.run([*coverage, "json", "--quiet", "-o", str(report)], cwd=ROOT, check=True)
    print(table_of(folder_rows(json.loads(Path(report).read_text(encoding="utf-8")))))
    return tests.returncode


if __name__ == "__main__":
    sys.exit(main())
