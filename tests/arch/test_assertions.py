"""A test that asserts nothing proves nothing."""

from __future__ import annotations

import pytest

from tests.arch.assertions import tests_without_assertion as without_assertion
from tests.arch.rules import ROOT, Source, tracked_files


def _test_sources() -> list[Source]:
    return [
        Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in tracked_files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == "tests"
    ]


def test_every_test_asserts_something() -> None:
    assert without_assertion(_test_sources()) == []


@pytest.mark.parametrize("body", ["f(1)", "x = 1", "same(1)", "subprocess.run(['x'], check=False)", "pass"])
def test_a_test_without_assertion_is_noticed(body: str) -> None:
    """Check a call of ``same``, which asserts in a file that the test does not import."""
    stranger = Source("tests/other.py", "def same(x):\n    assert x\n")
    assert len(without_assertion([stranger, Source("tests/test_a.py", f"def test_a():\n    {body}\n")])) == 1


@pytest.mark.parametrize(
    "body",
    [
        "assert x",
        "with pytest.raises(ValueError):\n        f()",
        "check(1)",
        "deep(1)",
        "run(check)",
        "subprocess.run(c, check=True)",
    ],
)
def test_direct_and_indirect_assertions_count(body: str) -> None:
    checker = Source("tests/other.py", "def check(x):\n    assert x\ndef deep(x):\n    return check(x)\n")
    test = Source("tests/test_a.py", f"from tests.other import check, deep\ndef test_a():\n    {body}\n")
    assert without_assertion([checker, test]) == []
