"""Every page is listed in the README, and every relative link leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.arch.rules import ROOT, link_complaints, links_of, tracked_files, unreachable_pages

README = ROOT / "README.md"
DECISIONS = ROOT / "docs" / "decisions"


def _pages() -> list[Path]:
    """Return the pages for readers, without the forms that a code host finds by their place."""
    return [path for path in tracked_files() if path.suffix == ".md" and ".github" not in path.parts]


def test_the_readme_leads_to_every_page() -> None:
    assert unreachable_pages(README, _pages()) == []


def test_a_page_that_nobody_links_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[the index](docs/index.md)")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[listed](listed.md)")
    (tmp_path / "docs/listed.md").write_text("text")
    (tmp_path / "docs/lost.md").write_text("[the index](index.md)")
    pages = sorted(tmp_path.rglob("*.md"))
    assert unreachable_pages(tmp_path / "README.md", pages) == [tmp_path / "docs/lost.md"]


def unlisted_records(listing: str, pages: Mapping[str, str]) -> list[str]:
    """Return the records that ``listing`` does not link by their numbers, and those without a status. ``pages``: by
    name."""
    parts = [
        (name, part)
        for name, text in pages.items()
        for part in re.split(r"^## (?:Decision (?=\d{4}$))?", text, flags=re.MULTILINE)
    ]
    return [
        f"{name}: {part[:4]}"
        for name, part in parts
        if part[:4].isdigit() and (f"[{part[:4]}]({name}#decision-{part[:4]})" not in listing or "Status:" not in part)
    ]


def test_the_list_of_decisions_has_every_record_and_each_says_its_status() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in DECISIONS.glob("*.md")}
    assert unlisted_records(pages.pop("README.md"), pages) == []
    assert len(pages) > 20


def test_a_record_that_is_not_listed_and_one_without_a_status_are_noticed() -> None:
    listing = "[0001](a.md#decision-0001), [0003](a.md#decision-0003)"
    page = (
        "## Decision 0001\nStatus: in force.\n## Decision 0002\nStatus: in force.\n## Decision 0003\n"
        "No word.\n## Smaller choices\nStatus: none\n"
    )
    assert unlisted_records(listing, {"a.md": page}) == ["a.md: 0002", "a.md: 0003"]


def test_every_relative_link_leads_somewhere() -> None:
    assert [c for page in _pages() for c in link_complaints(page, page.read_text(encoding="utf-8"))] == []


def test_a_dead_link_is_noticed() -> None:
    page = ROOT / "README.md"
    dead = "[a](docs/nowhere.md) [b](README.md#no-such-heading) [c](../outside.md)"
    alive = "# Here\n[a](README.md) [b](#here) [c](https://example.com/x)\n```\n[d](nowhere)\n```\n"
    assert len(link_complaints(page, dead)) == 3
    assert link_complaints(page, alive) == []
    assert len(links_of(alive)) == 3
