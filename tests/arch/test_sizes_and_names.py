"""Files and functions stay small, have names that say what they own, and leave no work for later."""

from __future__ import annotations

from tests.arch.rules import (
    FILE_STATEMENTS_MAX,
    FUNCTION_STATEMENTS_MAX,
    LONGER,
    ROOT,
    Source,
    machine_path_complaints,
    name_complaints,
    size_complaints,
    tracked_files,
    weft_sources,
    word_complaints,
)

TEXT_BYTES_MAX = 2_000_000


def _python_sources() -> list[Source]:
    return [
        Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in tracked_files()
        if path.suffix == ".py"
    ]


def test_files_and_functions_stay_small() -> None:
    assert size_complaints(weft_sources(), LONGER) == []


def test_a_long_file_a_long_function_and_a_needless_exception_are_noticed() -> None:
    long_file = Source("src/weft/a.py", "x = 1\n" * (FILE_STATEMENTS_MAX + 1))
    long_function = Source("src/weft/b.py", "def f():\n" + "    x = 1\n" * (FUNCTION_STATEMENTS_MAX + 1))
    just_right = Source("src/weft/c.py", "def f():\n" + "    x = 1\n" * FUNCTION_STATEMENTS_MAX)
    in_one_line = Source("src/weft/d.py", "def f():\n" + "    x = 1; y = 2\n" * FUNCTION_STATEMENTS_MAX)
    assert len(size_complaints([long_file])) == 1
    assert len(size_complaints([long_function])) == 1
    assert len(size_complaints([in_one_line])) == 1, "packing lines meets no limit"
    assert size_complaints([just_right]) == []
    assert size_complaints([long_function], {"src/weft/b.py: f": "a reason"}) == []
    assert len(size_complaints([just_right], {"src/weft/c.py: f": "a reason"})) == 1


def test_nothing_is_named_for_what_it_is_not() -> None:
    assert name_complaints(str(path.relative_to(ROOT)) for path in tracked_files()) == []


def test_a_drawer_is_noticed() -> None:
    assert len(name_complaints(["src/weft/utils.py", "tests/helpers/x.py", "benchmarks/_common.py"])) == 3
    assert name_complaints(["src/weft/units.py"]) == []


def test_nothing_is_left_for_later_and_every_test_runs() -> None:
    assert word_complaints(_python_sources()) == []


def test_work_left_for_later_is_noticed() -> None:
    left = Source("src/weft/a.py", "# TO" + "DO: later\nraise NotImplemented" + "Error\n")
    assert len(word_complaints([left])) == 2


def test_no_file_has_a_path_of_somebody_s_machine() -> None:
    complaints: list[str] = []
    for path in tracked_files():
        if path.stat().st_size < TEXT_BYTES_MAX and b"\0" not in (body := path.read_bytes()):
            place = str(path.relative_to(ROOT))
            complaints += machine_path_complaints(place, body.decode("utf-8", "replace"))
    assert complaints == []


def test_a_path_of_a_machine_is_noticed() -> None:
    for place in ("home/ada", "root", "Users/Ada", "work"):
        assert len(machine_path_complaints("a.md", f"see /{place}/thing for it")) == 1
    assert machine_path_complaints("a.md", "see docs/work/x, ~/root/, $X/home/y, POST /v1/models") == []
