"""The request that this task serves: its API key, and its fields that have no effect.

    the server's gate   API_KEY.set, begin_request --> context variables of the task
    anywhere below      API_KEY.get, note_ignored

Context variables, because these two facts concern queues and budgets far from the handler. Outside a server there is
no request: the key is ``NO_KEY``, and ignored fields are not reported.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field

NO_KEY = ""
"""The key of all requests, unless the server has keys."""
NAMES_MAX = 16
"""Most ignored fields that a request reports."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
API_KEY: ContextVar[str] = ContextVar("api_key", default=NO_KEY)
"""The API key whose shares this task uses: ``Tenant.owner``."""


def shown_name(name: str) -> str:
    """Return the name of a field for reports, which may come from the client: ``?`` for one of other characters."""
    return name if _NAME.fullmatch(name) else "?"


@dataclass(slots=True)
class IgnoredFields:
    """Fields of a request that have no effect. ``strict``: unknown fields are refused instead."""

    strict: bool = False
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        if len(self.names) < NAMES_MAX and name not in self.names:
            self.names.append(name)


_ignored: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


def begin_request(*, strict: bool) -> IgnoredFields:
    """Begin the list of fields that this request, handled in this task, will ignore."""
    ignored = IgnoredFields(strict)
    _ignored.set(ignored)
    return ignored


def ignored_fields() -> IgnoredFields | None:
    """Return the list of this request; None outside a request."""
    return _ignored.get()


def note_ignored(name: str) -> None:
    """Note a known field, or a part of one, that has no effect on this request. Some names come from the client."""
    ignored = _ignored.get()
    if ignored is not None:
        ignored.add(shown_name(name))
