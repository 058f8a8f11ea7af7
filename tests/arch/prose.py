"""Rules of prose that a program can check: docstrings, comments and Markdown.

A subject is a thing (the sequence, the request, the cache), never a person. Pictures and code are not prose.
Lines of Markdown have at most 120 characters and cells of tables at most 200, code blocks excepted: they show
what programs print.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.arch.rules import Source

MARKDOWN_LINE_MAX = 120
TABLE_CELL_MAX = 200

DIALECT: dict[str, re.Pattern[str]] = {
    "a sentence without a verb that begins with Of": re.compile(r"(?:^|[.!?]\s+)Of [^.:]*[.:]"),
    "a noun hidden in a sentence that begins with What": re.compile(r"(?:^|[.!?]\s+)What\b"),
    "a place for a relation: behind, beside, lies, stands": re.compile(r"\b(?:behind|beside|lies|stands)\b"),
}
"""Habits of this code's early English that no library has, by name. ``CEILINGS`` counts what is left of each."""

PERSONS = re.compile(
    r"\b(who|whoever|whom|whomever|nobody|somebody|everybody|anybody|someone|everyone|anyone"
    r"|no one|he|his|him)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"``.*?``|`[^`]*`")
_FENCE = re.compile(r"^( *)```.*?^ *```", re.DOTALL | re.MULTILINE)
_LIST_ITEM = re.compile(r"\s*(?:[-*] |\d+[.)] )")
_COMMENT_C = re.compile(r"//\s?(.*)$")
_LINK_TARGET = re.compile(r"\]\([^)]*\)")


def paragraphs_of(text: str) -> list[str]:
    """Paragraphs of a docstring or comment; indented lines, pictures and examples left out."""
    lines = text.split("\n")
    paragraphs: list[str] = []
    current: list[str] = []
    for number, line in enumerate(lines):
        words = line.strip()
        picture = (
            not words
            or (number and line.startswith("    "))
            or "-->" in words
            or words.startswith(("|", "+--", ">>>", "```"))
        )
        if picture or (current and _LIST_ITEM.match(words)):
            if current:
                paragraphs.append(" ".join(current))
            current = []
        if not picture:
            current.append(words)
    return [*paragraphs, " ".join(current)] if current else paragraphs


def _joined_comments(comments: list[tuple[int, str]], glue: str) -> Iterator[tuple[int, str]]:
    """Comments on consecutive lines are one text."""
    texts: list[list[str]] = []
    starts: list[int] = []
    last = -1
    for line, text in comments:
        if texts and line == last + 1:
            texts[-1].append(text)
        else:
            starts.append(line)
            texts.append([text])
        last = line
    return zip(starts, (glue.join(parts) for parts in texts), strict=True)


def _python_texts(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text_of_node))):
                yield node.lineno, text_of_node.replace("\n" + " " * node.col_offset, "\n")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    yield from _joined_comments(comments, " ")


def without_code_blocks(markdown: str) -> str:
    """The page with the same line numbers and empty lines instead of its code blocks."""
    return _FENCE.sub(lambda match: "\n" * match.group(0).count("\n"), markdown)


def _markdown_texts(text: str) -> Iterator[tuple[int, str]]:
    start, words = 0, ""
    for number, line in enumerate([*without_code_blocks(text).split("\n"), ""], 1):
        ends = not line.strip() or line.startswith(("|", "#")) or _LIST_ITEM.match(line)
        if ends and words:
            yield start, words
            words = ""
        if line.strip() and not line.startswith("|"):
            start, words = (start, f"{words} {line.strip()}") if words else (number, line.strip())
    for number, line in enumerate(without_code_blocks(text).split("\n"), 1):
        if line.startswith("|"):
            yield from ((number, cell.strip()) for cell in line.strip("|").split("|"))


def _c_texts(text: str) -> Iterator[tuple[int, str]]:
    comments = [
        (number, match.group(1))
        for number, line in enumerate(text.split("\n"), 1)
        if (match := _COMMENT_C.search(line))
    ]
    return _joined_comments(comments, "\n")


def prose_complaints(source: Source) -> list[str]:
    """Return a complaint for each person as a subject in a file of Python, C++ or Markdown."""
    if source.path.endswith(".py"):
        texts = _python_texts(source.text)
    elif source.path.endswith(".md"):
        texts = _markdown_texts(source.text)
    else:
        texts = _c_texts(source.text)
    complaints = []
    for line, text in texts:
        for paragraph in paragraphs_of(text):
            plain = _CODE.sub("X", paragraph)
            complaints += [
                f"{source.path}:{line}: the word {match.group(0)!r} in: "
                f"{plain[max(0, match.start() - 30) : match.end() + 30]}"
                for match in PERSONS.finditer(plain)
            ]
    return complaints


def dialect_counts(source: Source) -> dict[str, int]:
    """Return how often each habit of DIALECT occurs in the docstrings and comments of a Python file."""
    texts = [_CODE.sub("X", part) for _, text in _python_texts(source.text) for part in paragraphs_of(text)]
    return {name: sum(len(pattern.findall(text)) for text in texts) for name, pattern in DIALECT.items()}


def width_complaints(page: Source) -> list[str]:
    """Lines of Markdown and cells of tables that are too long."""
    complaints = []
    for number, line in enumerate(without_code_blocks(page.text).split("\n"), 1):
        if line.startswith("|"):
            cells = [len(_LINK_TARGET.sub("]", cell.strip())) for cell in line.strip("|").split("|")]
            complaints += [
                f"{page.path}:{number}: a cell of {cell} characters" for cell in cells if cell > TABLE_CELL_MAX
            ]
        elif len(line) > MARKDOWN_LINE_MAX:
            complaints.append(f"{page.path}:{number}: {len(line)} characters")
    return complaints
