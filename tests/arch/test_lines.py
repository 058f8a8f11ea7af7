"""Lines by folder: the table of docs/architecture.md against the code, and the smallest file.

A folder may have as many lines as its row says. What comes new raises the row of its folder in the same
change, and the row says so to the reader. The sum has a budget of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tests.arch.rules import ROOT, Source, weft_sources

PAGE = ROOT / "docs" / "architecture.md"
SLACK = 0.03
"""A row stays close to its folder: lines that were removed lower it."""
FILE_LINES_MIN = 40
_ROW = re.compile(r"^\| `(\w+)/` \| ([\d,]+) \|", re.MULTILINE)
_ROOT_ROW = re.compile(r"^\| \(root\) \| ([\d,]+) \|", re.MULTILINE)
_SINCE = re.compile(r"^\| since then \| lines \|\n\|---\|---\|\n(.*?)^\| \*\*.*\*\*([\d,]+)\*\* \|$",
                    re.MULTILINE | re.DOTALL)
BUDGET = 75_000
"""For the features of the day on which it was set."""
_SUM = re.compile(r"^\| \*\*sum\*\* \| \*\*([\d,]+)\*\* \|", re.MULTILINE)
NOT_YET_WHOLE: set[str] = set()
"""Slivers that no other module takes without a circle of imports or a heavy one. This set only shrinks."""
ENTRY_POINTS = {"src/weft/cli/bench.py", "src/weft/cli/serve.py", "src/weft/cli/version.py",
                "src/weft/fleet/ray_member.py"}


def folder_lines(sources: Iterable[Source]) -> Counter[str]:
    """Lines of each folder of src/weft, docstrings and blank lines included; "" is the root."""
    lines: Counter[str] = Counter()
    for source in sources:
        parts = source.path.split("/")
        lines[parts[2] if len(parts) > 3 else ""] += source.text.count("\n")
    return lines


def table(text: str) -> dict[str, int]:
    rows = {name: int(number.replace(",", "")) for name, number in _ROW.findall(text)}
    [root] = _ROOT_ROW.findall(text)
    return {"": int(root.replace(",", ""))} | rows


def line_complaints(lines: Counter[str], rows: dict[str, int]) -> list[str]:
    """Folders above their row, far below it, or on one side alone."""
    complaints = [f"{name or '(root)'}: {lines[name]} lines, and its row says {rows.get(name)}"
                  for name in lines if lines[name] and lines[name] > rows.get(name, 0)]
    return complaints + [f"{name or '(root)'}: it has {lines[name]} lines: lower its row from {row}"
                         for name, row in rows.items() if lines[name] < row * (1 - SLACK) - 20]


def test_the_table_of_lines_is_true() -> None:
    text = PAGE.read_text(encoding="utf-8")
    lines, rows = folder_lines(weft_sources()), table(text)
    assert line_complaints(lines, rows) == []
    [total] = _SUM.findall(text)
    assert int(total.replace(",", "")) == sum(rows.values())


def test_the_budget_is_that_of_the_first_day_and_what_came_since() -> None:
    [(rows, total)] = _SINCE.findall(PAGE.read_text(encoding="utf-8"))
    came = [int(row.rstrip(" |").rpartition(" ")[2].replace(",", "")) for row in rows.splitlines()]
    assert int(total.replace(",", "")) == BUDGET + sum(came)


def test_a_folder_above_its_row_and_one_far_below_are_noticed() -> None:
    lines = Counter({"memory": 101, "store": 10})
    assert len(line_complaints(lines, {"memory": 100, "store": 100})) == 2
    assert len(line_complaints(lines, {"store": 10})) == 1
    assert line_complaints(lines, {"memory": 101, "store": 10}) == []


def sliver_complaints(sources: Iterable[Source]) -> list[str]:
    """Files too short to be a thought: no package, no entry point, no family."""
    return [f"{source.path}: {lines} lines" for source in sources
            if (lines := source.text.count("\n")) < FILE_LINES_MIN
            and not source.path.endswith(("__init__.py", "__main__.py")) and source.path not in ENTRY_POINTS
            and not source.path.startswith(("src/weft/families/", "src/weft/models/"))]


def test_a_file_is_a_whole_thought() -> None:
    slivers = {complaint.partition(":")[0] for complaint in sliver_complaints(weft_sources())}
    assert slivers == NOT_YET_WHOLE


def test_a_sliver_is_noticed() -> None:
    assert len(sliver_complaints([Source("src/weft/memory/a.py", "x = 1\n" * (FILE_LINES_MIN - 1))])) == 1
    assert sliver_complaints([Source("src/weft/memory/a.py", "x = 1\n" * FILE_LINES_MIN),
                              Source("src/weft/families/b.py", "x = 1\n")]) == []
