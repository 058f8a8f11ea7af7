"""Shell lines of the pages, as a shell reads them: each with its page and line number.

Comments behind ``#`` are cut off. Lines that end in a backslash, and quotes that go on over lines, are
joined. A here-document is the input of its line. Of a pipe each command counts for itself. Variables in front
(``WEFT_MEMORY=4GiB weft serve``) are kept apart from the words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import Block, blocks_of

_VARIABLE = re.compile(r"[A-Z_]+=.*", re.DOTALL)
_HERE = re.compile(r"<<'?([A-Z]+)'?")
_BETWEEN = ("|", "&&", ";", "&")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """``words`` as a shell splits them; ``variables`` that stand before them."""

    page: str
    line: int
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class ShellLine:
    """A command, or a pipe of several. ``stdin`` is a here-document, ``file`` what stands behind ``>``."""

    text: str
    commands: tuple[CommandLine, ...]
    stdin: str = ""
    file: str = ""


def shell_lines(block: Block) -> Iterator[ShellLine]:
    """The lines of a bash block. Raises ValueError for a quote or a here-document without its end."""
    lines = list(enumerate(block.text.split("\n"), block.line))
    while lines:
        number, text = lines.pop(0)
        while True:
            if text.endswith("\\"):
                text = text[:-1] + " " + lines.pop(0)[1]
                continue
            try:
                words = _words(text)
                break
            except ValueError:
                if not lines:
                    raise
                text += "\n" + lines.pop(0)[1]
        if not words:
            continue
        stdin = ""
        if here := _HERE.search(text):
            while (line := lines.pop(0)[1]) != here.group(1):
                stdin += line + "\n"
            words = words[: words.index("<<")] + words[words.index("<<") + 2 :]
        file = words[words.index(">") + 1] if ">" in words else ""
        yield ShellLine(text, tuple(_commands(block.page, number, words)), stdin, file)


def _words(text: str) -> list[str]:
    splitter = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    splitter.whitespace_split = True
    return list(splitter)


def _commands(page: str, line: int, words: list[str]) -> Iterator[CommandLine]:
    command: list[str] = []
    for word in [*words, "|"]:
        if word in _BETWEEN:
            if command:
                yield _command(page, line, command)
            command = []
        else:
            command.append(word)


def _command(page: str, line: int, words: list[str]) -> CommandLine:
    count = next((at for at, word in enumerate(words) if not _VARIABLE.fullmatch(word)), len(words))
    end = words.index(">") if ">" in words else len(words)
    return CommandLine(page, line, tuple(words[count:end]), tuple(words[:count]))


def commands_of(page: str, text: str) -> Iterator[CommandLine]:
    """The command lines of one page."""
    for block in blocks_of(page, text):
        if block.language in ("bash", "sh"):
            for line in shell_lines(block):
                yield from line.commands


def commands_of_pages(pages: list[Path], root: Path) -> list[CommandLine]:
    """The command lines of ``pages``, in their order."""
    return [
        command
        for page in pages
        for command in commands_of(str(page.relative_to(root)), page.read_text(encoding="utf-8"))
    ]
