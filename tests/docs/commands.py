"""Command lines of the pages: every line of a bash block, with its page and line number.

Comments behind ``#`` are cut off, lines that end in a backslash are joined, and of a pipe each command counts
for itself. Variables in front (``WEFT_MEMORY=4GiB weft serve``) are kept apart from the words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """``words`` as a shell splits them; ``variables`` that stand before them."""

    page: str
    line: int
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def commands_of(page: str, text: str) -> Iterator[CommandLine]:
    """The command lines of one page."""
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1)) + 1
        pending, start = "", first
        for number, line in enumerate(block.group(1).split("\n"), first):
            if not pending:
                start = number
            if line.endswith("\\"):
                pending += line[:-1] + " "
                continue
            yield from _split(page, start, pending + line)
            pending = ""


def _split(page: str, line: int, text: str) -> Iterator[CommandLine]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return  # a quote that goes on over lines: the body of a curl
    command: list[str] = []
    for word in [*words, "|"]:
        if word in ("|", "&&", ";", "&"):
            if command:
                yield _command(page, line, command)
            command = []
        else:
            command.append(word)


def _command(page: str, line: int, words: list[str]) -> CommandLine:
    count = next((at for at, word in enumerate(words) if not _VARIABLE.fullmatch(word)), len(words))
    end = words.index(">") if ">" in words else len(words)
    return CommandLine(page, line, tuple(words[count:end]), tuple(words[:count]))


def commands_of_pages(pages: list[Path], root: Path) -> list[CommandLine]:
    """The command lines of ``pages``, in their order."""
    return [command for page in pages
            for command in commands_of(str(page.relative_to(root)), page.read_text(encoding="utf-8"))]
