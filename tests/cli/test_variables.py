"""A ``WEFT_...`` variable that nothing reads is one line on stderr, with the nearest name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.cli.flags import TEST_VARIABLES, known_variables, unknown_variables
from weft.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WEFT_NONSENSE", "weft reads no environment variable WEFT_NONSENSE, so it is ignored"),
        ("WEFT_MAX_MODEL_LENGTH", "WEFT_MAX_MODEL_LENGTH: did you mean WEFT_MAX_MODEL_LEN?"),
        ("WEFT_CHECKPOINTS", "WEFT_CHECKPOINTS: did you mean WEFT_SNAPSHOTS?"),
        ("WEFT_QUANTISE", "did you mean WEFT_QUANTIZE?"),
    ],
)
def test_an_unknown_variable_is_one_warning_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setenv(name, "4")
    assert main(["plan"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ")
    assert line.endswith(words)


def test_a_variable_of_another_command_is_no_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in known_variables():
        monkeypatch.setenv(name, "4")
    assert main(["plan"]) == 0
    assert capsys.readouterr().err == ""


def test_every_variable_that_the_repository_reads_is_known() -> None:
    reads = re.compile(r"(?:environ\S*?[\[(]|envvar=\[?(?:\"\w+\", )?)\"(WEFT_\w+)\"")
    files = [file for folder in ("src", "tests") for file in (ROOT / folder).rglob("*.py")]
    names = {name for file in files for name in reads.findall(file.read_text(encoding="utf-8"))}
    assert {"WEFT_URL", "WEFT_API_KEY", "WEFT_TEST_DEVICE"} <= names
    assert unknown_variables(names) is None
    assert names - known_variables() <= TEST_VARIABLES
