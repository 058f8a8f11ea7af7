"""Identifiers that say nothing, and public class names that two classes share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.arch.rules import Source, statements

VAGUE_WORDS = {"made", "there", "told", "taken", "kept", "found"}
"""They say that something happened to the value; a name says what the value is."""
FOREIGN_NAMES = {"connection_made"}
"""Methods that a library calls by this name (asyncio's protocols)."""


def identifiers(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name) of each name, attribute, parameter, keyword, function and class of a file."""
    for node in ast.walk(ast.parse(source.text)):
        match node:
            case ast.alias(asname=str(name)) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, name


def components(name: str) -> set[str]:
    """made_TW -> made, tw; KeptFrames -> kept, frames; FileNotFoundError -> file: Python and others name
    it."""
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.removesuffix("NotFoundError")).lower().split("_"))


def vague_name_complaints(sources: Iterable[Source]) -> list[str]:
    return [f"{source.path}:{line}: the name {name}" for source in sources
            for line, name in identifiers(source)
            if components(name) & VAGUE_WORDS and name not in FOREIGN_NAMES]


def public_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Name -> the files that define a public class of that name."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in statements(ast.parse(source.text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.path)
    return places


def repeated_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    return {name: paths for name, paths in public_classes(sources).items() if len(paths) > 1}
