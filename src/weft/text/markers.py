"""Texts that mean something inside a stream of text, which may arrive in pieces.

A marker such as ``</think>`` may come in one piece or in nine. A reader shows the text that cannot be the
beginning of a marker, and holds back the rest:

    "so 2 < 3 </th"   ->   shows "so 2 < 3 ", holds "</th"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def held_characters(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that is a beginning of a marker, but not all of it."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of ``markers`` begins, and which; of those that begin together, the longest."""
    best: tuple[int, str] | None = None
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (best is None or at < best[0] or (at == best[0] and len(marker) > len(best[1]))):
            best = at, marker
    return best


def may_become(text: str, markers: Iterable[str]) -> bool:
    """Whether more text could make ``text`` begin with one of ``markers``."""
    return any(marker.startswith(text) and marker != text for marker in markers)
