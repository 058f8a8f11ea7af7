"""A page opens with what it is for, and a long one with its sections: each a link, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.arch.prose import without_code_blocks
from tests.arch.rules import ROOT, anchors_of

PAGES = sorted((ROOT / "docs").glob("*.md"))
LONG = 300  # lines


def complaint(text: str) -> str:
    """Empty, or what the beginning of the page lacks."""
    title, opening = re.split(r"^##? .*\n", without_code_blocks(text), maxsplit=2, flags=re.MULTILINE)[:2]
    if title or len(opening.strip()) < 40:
        return "no words between the title and the first section"
    headings = re.findall(r"^## .*$", without_code_blocks(text), re.MULTILINE)
    wanted = [anchor for heading in headings for anchor in anchors_of(heading)]
    listed = re.findall(r"^- \[.*\]\(#(.*)\)$", opening, re.MULTILINE)
    if listed != wanted and (listed or text.count("\n") > LONG):
        return f"the contents are {listed}, and the sections {wanted}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_begins_with_its_purpose_and_a_long_one_with_its_contents(page: Path) -> None:
    assert complaint(page.read_text(encoding="utf-8")) == ""


def test_a_page_without_them_is_noticed() -> None:
    opening = "# Weights\n\nHow to serve a model in fewer bits than it was stored in.\n\n"
    long = "line\n" * LONG
    assert not complaint(f"{opening}## One\n")
    assert not complaint(f"{opening}- [One](#one)\n\n## One\n{long}")
    assert complaint("# Weights\n\n## One\n")
    assert complaint(f"{opening}## One\n{long}")
    assert complaint(f"{opening}- [Two](#two)\n\n## One\n")
