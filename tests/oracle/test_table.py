"""The section that says what was compared with transformers is about the checkpoints that there are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.fixtures.checkpoints import CHECKPOINTS
from tests.oracle import table


def test_the_section_has_a_row_for_every_checkpoint_and_each_is_equal() -> None:
    section = table.PAGE.read_text(encoding="utf-8").partition(table.TITLE)[2]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert [re.findall(r"`([^`]+)`", line)[0] for line in lines] == list(CHECKPOINTS), (
        "run python -m tests.oracle.table"
    )
    assert all(line.endswith("| yes |") for line in lines)


def test_a_checkpoint_that_differs_is_told_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = table.Row("one", "llama", "1 attention", "float32", 1e-6, 5.0, same_tokens=True)
    rows = {
        "one": right,
        "two": replace(right, name="two", same_tokens=False),
        "three": replace(right, name="three", error=1e-3),
    }
    monkeypatch.setattr(table, "compare", rows.__getitem__)
    assert table.main(["one"]) == 0
    assert table.main(["two"]) == 1
    assert table.main(["one", "three"]) == 1
    said = capsys.readouterr().out
    assert "| `two` | `llama` | 1 attention | float32 | 1.0e-06 | 5.0 | **no** |" in said
    assert "1.0e-03" in said
