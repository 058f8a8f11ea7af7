"""Docstrings, comments and pages are plain technical English, as far as a program can check it."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.arch.dialect_ceilings import CEILINGS, HABITS, RATES, excess, measured
from tests.arch.not_yet_clean import NOT_YET_CLEAN
from tests.arch.prose import (
    NO_NOUN,
    NO_VERB,
    dialect_counts,
    empty_names,
    prose_complaints,
    verbless_functions,
    width_complaints,
)
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


def test_the_habits_of_an_odd_english_only_get_fewer() -> None:
    assert excess(measured(), CEILINGS) == [], "more than before, as (area, habit, count, limit)"


def test_a_ceiling_follows_its_count_down() -> None:
    areas = measured()
    assert [area for area in CEILINGS if area not in areas] == [], "no longer there"
    slack = {area: row for area, row in CEILINGS.items() if sum(areas[area][1].values()) < sum(row) * 0.95 - 5}
    assert slack == {}, "fewer than the ceilings say: python -m tests.arch.dialect_ceilings"


def test_an_area_is_above_its_rate_or_its_ceiling() -> None:
    words = 20_000
    for column, habit in enumerate(HABITS):
        row = tuple(15 if other == column else 0 for other in range(len(HABITS)))
        allowed = int(20 * RATES[habit])
        few, many = Counter({habit: allowed}), Counter({habit: 16})
        assert excess({"docs/a.md": (words, few)}, {}) == []
        assert excess({"docs/a.md": (words, many)}, {}) == [("docs/a.md", habit, 16, allowed)]
        assert excess({"docs/a.md": (words, many)}, {"docs/a.md": row}) == [("docs/a.md", habit, 16, 15)]
        assert excess({"docs/a.md": (0, few)}, {"docs/a.md": row}) == []


def test_folders_and_pages_are_measured() -> None:
    assert {"src/weft", "src/weft/memory", "src/weft_tools/sim", "docs/server.md", "README.md"} <= set(measured())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Of the steps in flight.", 0),
        ("A row. Of waiting ones: none.", 0),
        ("What memory holds.", 1),
        ("Return it and what is left. Is that what it was?", 1),
        ("the page behind it", 2),
        ("The page lies in a frame.", 2),
        ("Tokens are brought home.", 2),
        ("Beside it stands a slot.", 2),
        ("at most so many bytes", 3),
        ("As many models stay as fit.", 3),
        ("it is read anew", 4),
        ("a reader alone", 4),
        ("zeros in place of numbers", 4),
        ("the begin of a run", 4),
        ("a commit applies it whole or not at all", 4),
        ("that is no name of a model", 4),
        ("terms that others call otherwise", 4),
        ("It frees its pages and those of the taps.", 5),
    ],
)
@pytest.mark.parametrize("path", ["src/weft/a.py", "docs/a.md"])
def test_each_habit_is_counted(path: str, text: str, found: int) -> None:
    name = HABITS[found]
    counts = dialect_counts(Source(path, f"# {text}\n" if path.endswith(".py") else f"{text}\n"))
    assert counts.pop(name) == (2 if "Beside" in text else 1)
    assert set(counts.values()) == {0}


@pytest.mark.parametrize("first", ["Of", "What", "The", "One", "Whether", "``rows``:", "[T, H]", "tokens", "Seconds"])
def test_a_function_whose_docstring_has_no_verb_is_noticed(first: str) -> None:
    text = f'class A:\n    """A noun."""\n    async def a(self):\n        """{first} of a step"""\n'
    assert [line for line, _ in verbless_functions(Source("a.py", text))] == [3]
    assert dialect_counts(Source("a.py", text))[NO_VERB] == 1


@pytest.mark.parametrize("first", ["Return", "Returns", "Raise", "Matches", "Carries", "Idle", "Free."])
def test_verbs_begin_docstrings_of_functions_and_nouns_those_of_properties(first: str) -> None:
    text = f'def a():\n    """{first} the row."""\n'
    assert [line for line, _ in verbless_functions(Source("a.py", text))] == ([1] if first == "Idle" else [])
    noun = 'class A:\n    @property\n    def a(self):\n        """Rows of a step."""\n'
    assert verbless_functions(Source("a.py", noun)) == []


@pytest.mark.parametrize(
    "text",
    [
        "one = 1",
        "at: int = 0",
        "for i, asked in rows: pass",
        "kept = [given for given in rows]",
        "def f(held): pass",
        "f = lambda *, one: 1",
        "class A:\n    held: int",
        "class A:\n    @property\n    def held(self): pass",
        "a.asked = 1",
        "if at := 1: pass",
        "with f() as given: pass",
        "match a:\n    case [1, *held]: pass\n    case {1: one}: pass",
    ],
)
def test_a_name_without_a_noun_is_noticed_where_it_is_bound(text: str) -> None:
    bound = len(empty_names(Source("a.py", text)))
    assert bound == (2 if "match" in text else 1)
    assert dialect_counts(Source("a.py", text))[NO_NOUN] == bound


def test_uses_of_a_name_and_names_that_only_contain_it_are_no_complaint() -> None:
    text = "import one\nprint(one, a.at, f(given=1))\nheld_pages = asked_s = 1\ndef at_page(page): pass"
    assert empty_names(Source("a.py", text)) == []


def test_code_and_other_sentences_have_none_of_the_habits() -> None:
    text = (
        '"""Return the tokens of a step, and a row: `behind`. What is it? A whole page; there is no slot, otherwise a'
        'row is no longer kept."""\nname = "Of it. What lies beside"\n'
    )
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
