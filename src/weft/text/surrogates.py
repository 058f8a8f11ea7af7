"""Halves of surrogate pairs in JSON texts: ``"\\ud83d"`` without its second half is not a character.

Agents cut the output of tools in the middle of an emoji, and send that text again with every later turn, so a server
that refuses it ends the session. Go and browsers read it as U+FFFD.
"""

from __future__ import annotations

import re

_HIGH_OR_LOW = re.compile(rb"u[dD][89a-fA-F]")
_SURROGATES = re.compile(rb"(?<!\\)(\\++)u([dD][89a-fA-F][0-9a-fA-F]{2})(\\u[dD][c-fC-F][0-9a-fA-F]{2})?")
"""Escapes of surrogates, perhaps with the second half of the pair. After an even number of backslashes it is text."""


def whole_characters(raw: bytes) -> bytes:
    """Return a JSON text with U+FFFD for each escape that is half of a surrogate pair."""
    return _SURROGATES.sub(_whole, raw) if _HIGH_OR_LOW.search(raw) else raw


def _whole(match: re.Match[bytes]) -> bytes:
    backslashes, first, second = match.groups()
    is_escape = len(backslashes) % 2 == 1
    if is_escape and second and first[1:2] in b"89abAB":
        return match[0]
    start = backslashes + (b"ufffd" if is_escape else b"u" + first)
    return start + (b"\\ufffd" if second else b"")
