"""Fenced blocks of the pages: commands and programs, what they print, pictures.

    ```bash                commands, one a line; ``sh`` is the same
    ```python              a program; the blocks of a page share one namespace
    ```toml                a config file of `weft serve`
    ```text  or  ```json   straight behind one of these: its output
    ```json                elsewhere: a value of a request or an answer
    ```                    a picture or a format; no line of it is a command

Law: what a reader may copy and run has a language, so a test can run it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_OUTPUT = re.compile(r"\n\n?```(text|json)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUNNABLE = ("bash", "sh", "python", "toml")
_COMMAND = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:weft|python3?|curl|make|pip|schemathesis) [\w.-]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """``line`` is that of the first line of ``text``. ``shown`` is the output on the page, in ``shown_as``;
    "" where the page shows none."""

    page: str
    line: int
    language: str
    text: str
    shown: str = ""
    shown_as: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """All blocks of a page in their order; the output of a block belongs to it and is none of its own."""
    blocks: list[Block] = []
    end = 0
    for fence in _FENCE.finditer(text):
        if fence.start() < end:
            continue
        language, end = fence.group(2), fence.end()
        shown, shown_as = "", ""
        if language in RUNNABLE and (output := _OUTPUT.match(text, fence.end())):
            shown_as, shown = output.groups()
            end = output.end()
        indent = len(fence.group(1))
        body = "\n".join(line[indent:] for line in fence.group(3).split("\n"))
        line = text.count("\n", 0, fence.start(3)) + 1
        blocks.append(Block(page, line, language, body, shown, shown_as))
    return blocks


def blocks_of_pages(pages: list[Path], root: Path) -> list[Block]:
    return [
        block for page in pages for block in blocks_of(str(page.relative_to(root)), page.read_text(encoding="utf-8"))
    ]


def complaint(block: Block) -> str:
    """Empty, or why this block breaks the law above."""
    if block.language == "text":
        return f"{block}: output that follows no command"
    if block.language not in (*RUNNABLE, "json", ""):
        return f"{block}: no block is in {block.language}"
    if block.language == "" and (command := _COMMAND.search(block.text)):
        return f"{block}: a command without a language: {command[0].strip()}"
    return ""
