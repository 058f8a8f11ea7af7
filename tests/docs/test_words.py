"""Every place that the table of words names is there."""

from __future__ import annotations

import re

from tests.arch.rules import ROOT

PAGE = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| [^|]* \|$", re.MULTILINE)


def missing_places(page: str) -> list[str]:
    """Words whose place is no file or folder of src/weft; ``*`` stands for any name."""
    rows = [(word, place) for word, place in _ROW.findall(page) if place.startswith("`")]
    assert rows, "the page has no table of words"
    source = ROOT / "src" / "weft"
    return [word for word, place in rows if not list(source.glob(place.strip("`").rstrip("/")))]


def test_every_word_has_its_place() -> None:
    assert missing_places(PAGE) == []


def test_a_place_that_is_gone_is_noticed() -> None:
    page = ("| arena | bytes | `memory/frames/arena.py` | pool |\n"
            "| strand | an edge | `memory/strand.py` | none |\n")
    assert missing_places(page) == ["strand"]
