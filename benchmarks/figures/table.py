"""The README's table of figures, written from ``benchmarks/results/figures-*.json``.

A column is a kind of CPU. Under the table a line for each says the machine, the commit and the day of its figures, and
the most that other programs used of it meanwhile.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.figures.parts import PARTS

RESULTS = Path(__file__).resolve().parents[1] / "results"
_BEGIN, _END = "<!-- figures: make figures -->\n", "<!-- end of figures -->\n"
LINE_MAX = 118
"""Characters of a line of the README."""
QUIET = 0.03
"""Share of a machine, from 0 to 1: where other programs used less, it counts as quiet."""


def reports() -> list[dict[str, Any]]:
    """Return the results of each kind of CPU, in the order of their names."""
    files = sorted(RESULTS.glob("figures-*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def circumstances(report: dict[str, Any]) -> str:
    """Return a sentence about the machine and the runs of ``report``."""
    parts = report["parts"].values()
    commits = sorted({f"{part['commit']} ({part['day']})" for part in parts})
    others = max(part["others"] for part in parts)
    load = "no other load" if others < QUIET else f"other programs used up to {100 * others:.0f} % of it"
    return f"{report['kind']}: {report['cores']} cores, {load}, torch {report['torch']}, commit {', '.join(commits)}."


def figures_table(made: list[dict[str, Any]]) -> str:
    """Return the table in Markdown, and the sentences under it."""
    kinds = [report["kind"] for report in made]
    rows = [["measured", *kinds, "how to repeat it"], ["---"] * (len(kinds) + 2)]
    for part in PARTS:
        measured = [report["parts"].get(part.name) for report in made]
        for row in part.rows:
            cells = ["" if one is None else row.cell(one["figures"]) for one in measured]
            if any(cells):
                rows.append([row.what, *cells, row.repeat])
    lines = ["| " + " | ".join(row).replace("|  |", "| |") + " |" for row in rows]
    lines[1] = "|" + "---|" * len(rows[0])
    said = "\n\n".join(textwrap.fill(circumstances(report), LINE_MAX) for report in made)
    return "\n".join(lines) + f"\n\n{said}\n"


def write_table(page: str) -> str:
    """Return ``page`` with its table of figures written anew from the results. Raise ValueError where it has none."""
    found = re.search(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", page, flags=re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no table between {_BEGIN.strip()} and {_END.strip()}")
    return page[: found.start()] + _BEGIN + "\n" + figures_table(reports()) + "\n" + _END + page[found.end() :]
