"""Identifiers that say nothing, and public class names that two classes share."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.arch.rules import Source, contents

VAGUE_WORDS = {"made", "there", "told", "taken", "kept", "found"}
"""Words that say what happened to a value. A name says what the value is."""
FOREIGN_NAMES = {"connection_made"}
"""Methods that a library calls by this name (asyncio's protocols)."""


def components(name: str) -> set[str]:
    """Return the words of a name: made and tw for made_TW, kept and frames for KeptFrames, only file for
    FileNotFoundError, a name of Python."""
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.removesuffix("NotFoundError")).lower().split("_"))


def vague_name_complaints(sources: Iterable[Source]) -> list[str]:
    return [
        f"{source.path}:{line}: the name {name}"
        for source in sources
        for name, line in contents(source).names.items()
        if components(name) & VAGUE_WORDS and name not in FOREIGN_NAMES
    ]


def public_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Name -> the files that define a public class of that name."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for name in contents(source).classes:
            if not name.startswith("_"):
                places.setdefault(name, []).append(source.path)
    return places


def repeated_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    return {name: paths for name, paths in public_classes(sources).items() if len(paths) > 1}
