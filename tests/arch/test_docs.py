"""Every page is listed in the README, and every relative link leads somewhere."""

from __future__ import annotations

from pathlib import Path

from tests.arch.rules import ROOT, link_complaints, links_of, tracked_files, unreachable_pages

README = ROOT / "README.md"


def _pages() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".md"]


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


def test_every_relative_link_leads_somewhere() -> None:
    assert [c for page in _pages() for c in link_complaints(page, page.read_text(encoding="utf-8"))] == []


def test_a_dead_link_is_noticed() -> None:
    page = ROOT / "README.md"
    dead = "[a](docs/nowhere.md) [b](README.md#no-such-heading) [c](../outside.md)"
    alive = "# Here\n[a](README.md) [b](#here) [c](https://example.com/x)\n```\n[d](nowhere)\n```\n"
    assert len(link_complaints(page, dead)) == 3
    assert link_complaints(page, alive) == []
    assert len(links_of(alive)) == 3
