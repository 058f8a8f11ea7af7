"""Fields of a request that this server ignores, and how the client learns of it.

    body --check_known--> unknown names --> a 400 with --strict-fields
                                        --> else X-Weft-Ignored of the answer, access log, one warning

A typo such as ``max_token`` changes an answer without a word otherwise. Clients of every API version send
fields that no server knows, so it is an error only where the operator wants that.

The request's list is a context variable: bodies are parsed far from the answer, large ones in a thread. Only
names that are plain words are told, and few of them: they come from a client.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass, field

from weft.errors import RequestError

HEADER = "x-weft-ignored"
_NAMES_MAX = 8
_WARNED_MAX = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger("weft.server")
_warned: set[str] = set()
"""Each is warned of once: a client sends it with every request."""


@dataclass(slots=True)
class IgnoredFields:
    strict: bool = False
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        if len(self.names) < _NAMES_MAX and name not in self.names:
            self.names.append(name)


_of_request: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def begin_request(*, strict: bool) -> IgnoredFields:
    """What this request, handled in this task, will ignore."""
    ignored = IgnoredFields(strict)
    _of_request.set(ignored)
    return ignored


def ignored_names() -> list[str]:
    """Of the request that this task handles."""
    ignored = _of_request.get()
    return [] if ignored is None else ignored.names


def note_ignored(name: str) -> None:
    """A known field that has no effect on this request."""
    ignored = _of_request.get()
    if ignored is not None:
        ignored.add(name)


def check_known(given: Collection[str], known: Collection[str]) -> None:
    """Notes the unknown ones. Raises RequestError for the first with --strict-fields."""
    ignored = _of_request.get()
    for name in given:
        if name in known or ignored is None:
            continue
        shown = name if _NAME.fullmatch(name) else "?"
        said = f"the field {shown} is unknown{did_you_mean(shown, known)}"
        if ignored.strict:
            raise RequestError(f"{said}; this server refuses unknown fields (--strict-fields)", param=shown,
                               code="unknown_field")
        ignored.add(shown)
        if shown not in _warned and len(_warned) < _WARNED_MAX:
            _warned.add(shown)
            _log.warning("%s and was ignored; further requests with it are not reported", said)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a sentence about ``name``, if one of ``known`` is close to it."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower()[:200], by_lower, 1, 0.75)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""
