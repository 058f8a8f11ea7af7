"""Every place that the table of words names is there."""

from __future__ import annotations

import re

from tests.arch.rules import ROOT

PAGE = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| [^|]* \|$", re.MULTILINE)


def missing_places(page: str) -> list[str]:
    """Return the words whose place is no file or folder of src/weft, src or the root; ``*`` matches any name."""
    rows = [(word, place) for word, place in _ROW.findall(page) if place.startswith("`")]
    assert rows, "the page has no table of words"
    places = [(word, place.strip("`").rstrip("/")) for word, place in rows]
    return [
        word
        for word, place in places
        if not any(list(root.glob(place)) for root in (ROOT / "src" / "weft", ROOT / "src", ROOT))
    ]


def test_every_word_has_its_place() -> None:
    assert missing_places(PAGE) == []


def test_the_page_of_memory_lists_each_of_its_files() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    table = page[page.index("| room | file | owns |") : page.index("### Operations")]
    cells = [row.split("|")[2] for row in table.splitlines()[2:] if row]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    memory = ROOT / "src" / "weft" / "memory"
    files = [file.stem for folder in ("", "frames", "prefix") for file in (memory / folder).glob("[!_]*.py")]
    assert sorted(listed) == sorted(files)


def test_a_place_that_is_gone_is_noticed() -> None:
    page = "| arena | bytes | `memory/frames/arena.py` | pool |\n| strand | an edge | `memory/strand.py` | none |\n"
    assert missing_places(page) == ["strand"]
