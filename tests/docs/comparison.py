"""What a page shows against what a command printed.

Text is compared line by line. These differ from run to run and match any other of their kind:

    12 ms   0.4 s   9.3 tokens/s   11.2 GiB free      a figure of time, of speed, of free memory
    127.0.0.1:8000                                    a port
    chatcmpl-5f...  batch_1f00...                     an id: eight hexadecimal digits or more
    1750000000                                        seconds since 1970

``...`` in a line matches any text, and a line of ``...`` alone any lines. Runs of spaces count as one. All
else, other figures included, must be equal.

JSON is compared as a part: each field on the page must be in the answer with an equal value, and fields that
the page leaves out may have any. Lists are equal item by item, or a list on the page ends in "..." and the
first items are equal. Texts follow the rules above.
"""

from __future__ import annotations

import json
import re
from typing import Any

_FIGURE = r"\d[\d,]*(?:\.\d+)?"
_KINDS = [
    (re.compile(rf"\b{_FIGURE} ?(ns|us|µs|ms|s|min|h)\b"), r"# \1"),
    (re.compile(rf"\b{_FIGURE} ((?:[KMG]i?B|tokens|tok|requests|steps)/s)"), r"# \1"),
    (re.compile(rf"\b{_FIGURE} ([KMG]i?B) (free|RAM free)\b"), r"# \1 \2"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:#"),
    (re.compile(r"\b(\w+[-_])?[0-9a-f]{8,}\b"), r"\1#"),
    (re.compile(r"\b1\d{9}\b"), "#time"),
    (re.compile(r" +"), " "),
]


def settled(line: str) -> str:
    """``line`` with a mark for each figure that may differ."""
    for pattern, mark in _KINDS:
        line = pattern.sub(mark, line)
    return line.strip()


def _pattern(shown: str) -> re.Pattern[str]:
    lines = []
    for line in shown.strip("\n").split("\n"):
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*?")
        else:
            lines.append(
                ".*".join(
                    re.escape(part.strip()) if part.strip() == "" else re.escape(part)
                    for part in settled(line).split("...")
                )
                + r"\n"
            )
    return re.compile("".join(lines))


def text_complaint(shown: str, printed: str) -> str:
    """Empty, or both texts where the page and the command differ."""
    lines = "".join(settled(line) + "\n" for line in printed.strip("\n").split("\n"))
    if _pattern(shown).fullmatch(lines):
        return ""
    return f"the page shows:\n{shown.strip()}\nand the command prints:\n{printed.strip()}"


def json_complaint(shown: Any, printed: Any, path: str = "$") -> str:
    """Empty, or the first place where ``shown`` is no part of ``printed``."""
    if isinstance(shown, dict) and isinstance(printed, dict):
        for key, value in shown.items():
            if key not in printed:
                return f"{path}.{key}: not in the answer, which has {', '.join(printed)}"
            if complaint := json_complaint(value, printed[key], f"{path}.{key}"):
                return complaint
        return ""
    if isinstance(shown, list) and isinstance(printed, list):
        begins = shown[-1:] == ["..."]
        items = shown[:-1] if begins else shown
        if len(printed) < len(items) or (not begins and len(printed) != len(items)):
            return f"{path}: {len(items)} items on the page, {len(printed)} in the answer"
        pairs = enumerate(zip(items, printed, strict=False))
        return next(filter(None, (json_complaint(a, b, f"{path}[{at}]") for at, (a, b) in pairs)), "")
    if isinstance(shown, str) and isinstance(printed, str):
        same = not text_complaint(shown, printed)
    else:
        same = type(shown) is type(printed) and shown == printed
    return "" if same else f"{path}: {shown!r} on the page, {printed!r} printed"


def complaint(shown: str, shown_as: str, printed: str) -> str:
    """Empty, or what is wrong with the output ``shown`` on a page."""
    if shown_as == "json":
        try:
            return json_complaint(json.loads(shown), json.loads(printed))
        except ValueError as error:
            return f"no JSON ({error}): {printed}"
    return text_complaint(shown, printed)
