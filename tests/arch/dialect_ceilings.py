"""Ceilings of the habits that ``prose.DIALECT`` counts, by area: they only fall.

``python -m tests.arch.dialect_ceilings`` writes this table again from today's counts; it refuses to raise a number.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.arch.prose import DIALECT, NO_NOUN, NO_VERB, dialect_counts, words_of
from tests.arch.rules import ROOT, Source, area_of, weft_sources

HABITS = (*DIALECT, NO_VERB, NO_NOUN)
"""Columns of ``CEILINGS``."""
RATES = dict(zip(HABITS, (0.5, 0.5, 0.2, 0.2, 0.2, 0.5, 0.2, 0.0), strict=True))
"""Occurrences per 1,000 words that every area may have; an area within all of them has no row. Names without a noun
have no rate: prose does not excuse them."""

# fmt: off
CEILINGS: dict[str, tuple[int, ...]] = {
}
# fmt: on
"""``rules.area_of`` -> occurrences of each of ``HABITS``."""


@functools.cache
def measured() -> dict[str, tuple[int, Counter[str]]]:
    """Return words and counts of each area: packages by folder, pages one by one."""
    pages = [
        Source(str(path.relative_to(ROOT)), path.read_text("utf-8"))
        for path in (*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md")
    ]
    return counted([*weft_sources(), *pages])


def counted(sources: Iterable[Source]) -> dict[str, tuple[int, Counter[str]]]:
    """Return words and counts of each area of these files."""
    areas: dict[str, tuple[int, Counter[str]]] = {}
    for source in sources:
        words, counts = areas.get(area_of(source.path), (0, Counter()))
        areas[area_of(source.path)] = words + words_of(source), counts + Counter(dialect_counts(source))
    return areas


def excess(
    areas: dict[str, tuple[int, Counter[str]]], ceilings: dict[str, tuple[int, ...]]
) -> list[tuple[str, str, int, int]]:
    """Return area, habit, count and limit for each count above both its rate and its ceiling."""
    found = []
    for area, (words, counts) in areas.items():
        for habit, ceiling in zip(HABITS, ceilings.get(area, (0,) * len(HABITS)), strict=True):
            limit = max(ceiling, int(RATES[habit] * words / 1000))
            if counts[habit] > limit:
                found.append((area, habit, counts[habit], limit))
    return found


def _main() -> None:
    areas = measured()
    raised = excess(areas, CEILINGS) if "--raise" not in sys.argv else []
    if raised:
        sys.exit("\n".join(f"{area}: {habit}: {count}, at most {limit}" for area, habit, count, limit in raised))
    rows = []
    for area in sorted({area for area, _, _, _ in excess(areas, {})}):
        rows.append(f'    "{area}": ({", ".join(str(areas[area][1][habit]) for habit in HABITS)}),\n')
    path = Path(__file__)
    table = re.compile(r"(?<=] = \{\n).*?(?=^\}\n# fmt: on)", re.DOTALL | re.MULTILINE)
    path.write_text(table.sub("".join(rows), path.read_text("utf-8"), count=1), encoding="utf-8")


if __name__ == "__main__":
    _main()
