"""A word of weft's own is linked to the table of words where a page first uses one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.arch.rules import ROOT

OWN = re.compile(r"\b(arena|lease|tap|twin|ghost|tail)s?\b")
_SPANS = re.compile(r"```[\s\S]*?```|`[^`]*`|^#.*$", re.MULTILINE)
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "words.md")


def complaint(text: str) -> str:
    """Empty, or the first own word of the page that leads nowhere."""
    prose = _SPANS.sub(lambda span: re.sub(r"[^\n]", " ", span[0]), text)
    first = OWN.search(prose)
    if first is None or re.match(r"\*?\]\(words\.md#[a-z-]+\)", prose[first.end() :]):
        return ""
    return prose[max(first.start() - 30, 0) : first.end() + 30]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_first_own_word_of_a_page_is_a_link(page: Path) -> None:
    assert complaint(page.read_text(encoding="utf-8")) == ""


def test_a_page_without_the_link_is_noticed() -> None:
    assert complaint("# A\n\n`arena` lies in one arena.\n")
    assert not complaint("All of it lies in one [arena](words.md#memory), an arena.\n")
    assert not complaint("# The arena\n\nNothing.\n")
