"""Statements by folder: the headings of tests/arch/budgets.md against the code, and the smallest file.

A folder's heading has the limit of its statements. A change that needs more raises it, so reviewers see the price.
Statements (``ast.stmt``) are counted because no formatting changes them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable

from tests.arch.rules import ROOT, Source, contents, weft_sources

PAGE = ROOT / "tests" / "arch" / "budgets.md"
SLACK = 0.03
"""Share by which a limit may exceed its folder: removed code lowers the limit."""
FILE_STATEMENTS_MIN = 12
_HEADING = re.compile(r"^## `?\(?(\w+)\)?/?`?: ([\d,]+)$", re.MULTILINE)
ROOT_ROW = "root"
NOT_YET_WHOLE: set[str] = set()
"""Short files that cannot be merged into another one without a circle of imports or a heavy import. This set only
shrinks."""
ENTRY_POINTS = {
    "src/weft_tools/commands/bench.py",
    "src/weft/cli/serve.py",
    "src/weft/cli/version.py",
    "src/weft/fleet/ray_member.py",
}


def folder_statements(sources: Iterable[Source]) -> Counter[str]:
    """Return the statements of each folder of src/weft; files of the root count under ROOT_ROW."""
    counts: Counter[str] = Counter()
    for source in sources:
        parts = source.path.split("/")
        counts[parts[2] if len(parts) > 3 else ROOT_ROW] += contents(source).statements
    return counts


def number(text: str) -> int:
    return int(text.replace(",", ""))


def budgets(page: str) -> dict[str, int]:
    """Return the limit of each folder by its name."""
    return {name: number(count) for name, count in _HEADING.findall(page)}


def budget_complaints(counts: Counter[str], limits: dict[str, int]) -> list[str]:
    """Return a complaint for each folder above its limit, far below it, or present on one side only."""
    above = [
        f"{name}: {counts[name]} statements, and its limit is {limits.get(name)}"
        for name in counts
        if counts[name] > limits.get(name, 0)
    ]
    return above + [
        f"{name}: {counts[name]} statements: lower its limit from {limit}"
        for name, limit in limits.items()
        if counts[name] < limit * (1 - SLACK) - 20
    ]


def test_each_folder_is_within_its_budget() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("\n## ") == len(budgets(page))
    assert budget_complaints(folder_statements(weft_sources()), budgets(page)) == []


def test_a_folder_above_its_limit_far_below_it_or_without_one_is_noticed() -> None:
    counts = Counter({"memory": 101, "store": 10})
    assert len(budget_complaints(counts, {"memory": 100, "store": 100})) == 2
    assert len(budget_complaints(counts, {"store": 10})) == 1
    assert budget_complaints(counts, {"memory": 101, "store": 10}) == []


def test_statements_are_counted_in_every_block() -> None:
    text = "if a:\n    x = 1\nelse:\n    def f():\n        return 2\n"
    counts = folder_statements([Source("src/weft/memory/a.py", text), Source("src/weft/units.py", "x = 1; y = 2\n")])
    assert counts == {"memory": 4, ROOT_ROW: 2}
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))) == 4


def sliver_complaints(sources: Iterable[Source]) -> list[str]:
    """Return files too short to be a module of their own; packages, entry points and families may be short."""
    return [
        f"{source.path}: {count} statements"
        for source in sources
        if (count := contents(source).statements) < FILE_STATEMENTS_MIN
        and not source.path.endswith(("__init__.py", "__main__.py"))
        and source.path not in ENTRY_POINTS
        and not source.path.startswith(("src/weft/families/", "src/weft/models/"))
    ]


def test_a_file_is_a_whole_thought() -> None:
    slivers = {complaint.partition(":")[0] for complaint in sliver_complaints(weft_sources())}
    assert slivers == NOT_YET_WHOLE


def test_a_sliver_is_noticed() -> None:
    assert len(sliver_complaints([Source("src/weft/memory/a.py", "x = 1\n" * (FILE_STATEMENTS_MIN - 1))])) == 1
    assert (
        sliver_complaints(
            [
                Source("src/weft/memory/a.py", "x = 1\n" * FILE_STATEMENTS_MIN),
                Source("src/weft/families/b.py", "x = 1\n"),
            ]
        )
        == []
    )
