"""Docstrings, comments and pages are plain technical English, as far as a program can check it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.arch.not_yet_clean import NOT_YET_CLEAN
from tests.arch.prose import DIALECT, dialect_counts, prose_complaints, width_complaints
from tests.arch.rules import ROOT, Source, beyond_the_ratchet, tracked_files, weft_sources


def _files(*suffixes: str) -> list[Source]:
    return [
        Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in tracked_files()
        if path.suffix in suffixes
    ]


def test_things_are_the_subjects_of_sentences() -> None:
    sources = [*weft_sources(), *_files(".md", ".cpp", ".hpp")]
    complaints = [complaint for source in sources for complaint in prose_complaints(source)]
    assert beyond_the_ratchet(complaints, NOT_YET_CLEAN["prose"]) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", '"""A request whoever sends it."""\n'),
        ("a.py", "# Nobody waits.\n"),
        ("a.md", "Someone waits.\n"),
        ("a.md", "| page | held by whom |\n"),
        ("a.cpp", "int x;  // he waits\n"),
    ],
)
def test_a_person_as_a_subject_is_noticed(path: str, text: str) -> None:
    assert len(prose_complaints(Source(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", '"""Short."""\nx = "who"\n'),
        ("a.py", '"""A picture:\n\n    words who\n"""\n'),
        ("a.md", "```\nwords who\n```\n"),
        ("a.md", "`who` is code.\n"),
    ],
)
def test_pictures_and_code_are_no_complaint(path: str, text: str) -> None:
    assert prose_complaints(Source(path, text)) == []


CEILINGS = dict(zip(DIALECT, (252, 257, 414), strict=True))
"""Occurrences in src/weft. They only fall: a change that removes some lowers the number in the same commit."""


def test_the_habits_of_an_odd_english_only_get_fewer() -> None:
    left: Counter[str] = Counter()
    for source in weft_sources():
        left.update(dialect_counts(source))
    assert {name: count for name, count in left.items() if count > CEILINGS[name]} == {}, "more than before"
    slack = {name: count for name, count in left.items() if count < CEILINGS[name] * 0.97 - 5}
    assert slack == {}, "fewer than the ceiling says: lower it"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""Of the steps in flight."""\n', 0),
        ("# A row. Of waiting ones: none.\n", 0),
        ('"""What memory holds."""\n', 1),
        ('"""Return it. What is left is free."""\n', 1),
        ("# the page behind it lies beside the slot\n", 2),
    ],
)
def test_each_habit_is_counted(text: str, found: int) -> None:
    name = list(DIALECT)[found]
    counts = dialect_counts(Source("src/weft/a.py", text))
    assert counts.pop(name) == (3 if "behind" in text else 1)
    assert set(counts.values()) == {0}


def test_code_and_other_sentences_have_none_of_the_habits() -> None:
    text = '"""Return the tokens of a step, and what a kernel reads: `behind`."""\nWhat = "Of it. What lies beside"\n'
    assert set(dialect_counts(Source("src/weft/a.py", text)).values()) == {0}


def test_lines_of_markdown_and_cells_of_tables_are_short() -> None:
    complaints = [complaint for page in _files(".md") for complaint in width_complaints(page)]
    assert beyond_the_ratchet(complaints, NOT_YET_CLEAN["width"]) == []


def test_a_long_line_and_a_long_cell_are_noticed() -> None:
    row, link = f"| {'x ' * 90} | {'x ' * 90} |", f"| [{'x ' * 20}]({'x' * 200}) |"
    assert width_complaints(Source("a.md", f"{row}\n{link}\n```\n{'x' * 200}\n```\n{'x' * 120}\n")) == []
    assert len(width_complaints(Source("a.md", f"{'x' * 121}\n| {'x' * 201} |\n"))) == 2


def test_the_ratchet_only_shrinks() -> None:
    complaints = ["src/weft/memory/tree.py:3: bad", "docs/a.md:1: bad", "src/weft/units.py:1: bad"]
    assert beyond_the_ratchet(complaints, {"src/weft/memory", "docs/a.md", "src/weft"}) == []
    assert beyond_the_ratchet(complaints, {"src/weft/memory", "src/weft"}) == ["docs/a.md:1: bad"]
    assert len(beyond_the_ratchet(complaints, {"src/weft/memory", "src/weft", "docs/a.md", "csrc"})) == 1
