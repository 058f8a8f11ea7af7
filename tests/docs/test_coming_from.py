"""docs/cli.md for users of other engines: what it says of their flags is what the command line says."""

from __future__ import annotations

import re

import pytest

from tests.arch.rules import ROOT
from weft.foreign import FOREIGN_FLAGS, foreign_flag

PAGE = (ROOT / "docs/cli.md").read_text()
START = PAGE[: PAGE.index("\n## Coming from another engine\n")].count("\n") + 1
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
ROWS = [
    (number, *map(str.strip, line.strip("|").split("|")))
    for number, line in enumerate(PAGE.splitlines(), 1)
    if number > START and line.startswith("| `-")
]


def flags_of_serve() -> set[str]:
    from weft.cli.serve import command

    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)}


@pytest.mark.parametrize(("number", "there", "here"), ROWS, ids=[f"line {row[0]}" for row in ROWS])
def test_a_flag_of_another_engine_is_answered_as_the_page_says(number: int, there: str, here: str) -> None:
    own = flags_of_serve()
    for flag in FLAG.findall(there):
        if flag in own:
            continue
        answer = foreign_flag(flag)
        assert answer is not None, f"line {number}: {flag} is neither a flag here nor known"
        if answer.instead.startswith("--"):
            assert answer.instead.split()[0] in here, f"line {number}: {flag} is answered with {answer.instead}"
    for flag in FLAG.findall(here):
        assert flag in own or flag == "--config", f"line {number}: {flag} is no flag of weft serve"


def test_the_page_has_rows_and_a_wrong_one_fails() -> None:
    assert len(ROWS) > 15
    assert "--tensor-parallel-size" in FOREIGN_FLAGS
    with pytest.raises(AssertionError, match="is answered with --tp"):
        test_a_flag_of_another_engine_is_answered_as_the_page_says(1, "`--tensor-parallel-size`", "`--replicas`")
