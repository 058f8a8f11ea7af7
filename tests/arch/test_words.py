"""Names say what a value is, and a public class has its name for itself."""

from __future__ import annotations

import pytest

from tests.arch.not_yet_clean import NOT_YET_CLEAN
from tests.arch.rules import Source, beyond_the_ratchet, weft_sources
from tests.arch.words import repeated_classes, vague_name_complaints


def test_names_say_what_a_value_is() -> None:
    assert beyond_the_ratchet(vague_name_complaints(weft_sources()), NOT_YET_CLEAN["vague names"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "made = 1\n",
        "x.there_RC = 2\n",
        "def told(): pass\n",
        "class KeptFrames: pass\n",
        "f(found=1)\n",
        "def f(taken): pass\n",
        "import a as made_TW\n",
        "_found: int\n",
        "async def kept_pages(): pass\n",
    ],
)
def test_a_name_that_says_nothing_is_noticed(text: str) -> None:
    assert len(vague_name_complaints([Source("src/weft/a.py", text)])) == 1


def test_words_in_other_words_are_no_complaint() -> None:
    fine = Source("src/weft/a.py", "foundation = mistaken = '''made'''\nexcept_ = FileNotFoundError  # kept\n")
    assert vague_name_complaints([fine]) == []


def test_no_two_public_classes_share_a_name() -> None:
    complaints = [
        f"{path}:1: {name} is in {paths}" for name, paths in repeated_classes(weft_sources()).items() for path in paths
    ]
    assert beyond_the_ratchet(complaints, NOT_YET_CLEAN["class names"]) == []


def test_a_second_class_of_a_name_is_noticed() -> None:
    files = [
        Source("src/weft/a.py", "class Room: pass\nclass _Own: pass\n"),
        Source("src/weft/b.py", "class Room: pass\nclass _Own: pass\nclass Other: pass\n"),
    ]
    assert repeated_classes(files) == {"Room": ["src/weft/a.py", "src/weft/b.py"]}
