"""`weft --help` feels instant: it imports little, and costs a small multiple of a bare python start.

The cost is a ratio between starts measured in turns on the same machine, never a number of seconds: on a
busy machine both get slower together.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

ROUNDS = 7
HELP_STARTS_MAX = 12.0
"""Bare python starts that one `weft --help` may cost; click alone is about 4."""

HEAVY = ("torch", "transformers", "numpy", "rich", "msgspec", "starlette", "uvicorn", "httpx", "tokenizers")
RUN_HELP = "from weft.cli.main import main\nmain({arguments!r})"


def _seconds(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return time.perf_counter() - begin


def _starts(code: str) -> float:
    """How many bare python starts running ``code`` costs: the best of some rounds, taken in turns."""
    bare, own = [], []
    for _ in range(ROUNDS):
        bare.append(_seconds("pass"))
        own.append(_seconds(code))
    return min(own) / min(bare)


def _heavy_after(arguments: list[str], before: str = "pass") -> set[str]:
    help_run = RUN_HELP.format(arguments=arguments)
    code = f"{before}\n{help_run}\nimport sys\nprint('LOADED', *sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(answer.stdout.rsplit("LOADED", 1)[1].split()) & set(HEAVY)


def test_help_costs_few_python_starts() -> None:
    assert _starts(RUN_HELP.format(arguments=["--help"])) < HELP_STARTS_MAX


def test_a_help_that_imports_torch_is_noticed() -> None:
    slow = "import torch\n" + RUN_HELP.format(arguments=["--help"])
    assert min(_seconds(slow) for _ in range(2)) / min(_seconds("pass") for _ in range(5)) > HELP_STARTS_MAX


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["version"], ["run"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    assert _heavy_after(arguments) == set()


@pytest.mark.parametrize("verb", ["serve", "generate", "chat", "eval", "doctor"])
def test_the_help_of_a_verb_imports_no_torch(verb: str) -> None:
    assert not _heavy_after([verb, "--help"]) & {"torch", "transformers", "numpy"}


def test_a_heavy_import_is_noticed() -> None:
    assert _heavy_after(["--help"], before="import numpy") == {"numpy"}
