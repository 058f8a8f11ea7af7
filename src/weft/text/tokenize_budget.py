"""Bounds on the text that is tokenized at once.

a long text --spending--> a thread --> tokens
                                  |
     too large by itself: 413; too large with other texts, or beyond the share of its key: 503
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from weft.errors import QueueFullError, RequestError
from weft.text.current_request import API_KEY, NO_KEY

_KEY_SHARE = 0.5
"""Part of the budget that the requests of one API key may have together."""


class TextTooLongError(RequestError):
    """The text is over limits.max_tokenize_chars, or takes more than limits.tokenize_memory."""

    status = 413


class TokenizeBudget:
    """Bounds on the characters, and on the memory for them, that are tokenized at once, over all requests (law L11): a
    megabyte takes a second of a core, and the engine needs the cores. Short texts are not counted. The requests of one
    API key may use half of the budget, so that another key always finds room."""

    def __init__(self, chars: int, memory_bytes: int) -> None:
        self._limits = {
            "limits.max_tokenize_chars": (chars, "characters"),
            "limits.tokenize_memory": (memory_bytes, "bytes of memory to tokenize"),
        }
        self._spent: Counter[tuple[str, str]] = Counter()
        """Spent amounts by limit and key."""

    @contextlib.contextmanager
    def spending(self, chars: int, memory_bytes: int) -> Iterator[None]:
        """Count a text within the block. Raise TextTooLongError, QueueFullError."""
        key = API_KEY.get()
        needs = dict(zip(self._limits, (chars, memory_bytes), strict=True))
        for flag, need in needs.items():
            self._check(flag, need, key)
        for flag, need in needs.items():
            self._spent[flag, key] += need
        try:
            yield
        finally:
            for flag, need in needs.items():
                self._spent[flag, key] -= need
                if not self._spent[flag, key]:
                    del self._spent[flag, key]

    def _check(self, flag: str, need: int, key: str) -> None:
        limit, unit = self._limits[flag]
        own_limit = limit if key == NO_KEY else int(limit * _KEY_SHARE)
        if need > own_limit:
            whose = "" if own_limit == limit else f" an API key, half of {limit}"
            raise TextTooLongError(
                f"the text has {need} {unit}; the limit is {own_limit}{whose} ({flag})",
                param="prompt",
                code="text_too_long",
            )
        own = self._spent[flag, key]
        spent = sum(count for (of, _), count in self._spent.items() if of == flag)
        if spent + need > limit or own + need > own_limit:
            waiting, limit = (spent, limit) if spent + need > limit else (own, own_limit)
            raise QueueFullError(
                f"texts with {waiting} {unit} are being tokenized, and this one has {need}; the limit is {limit} "
                f"({flag}). Try again later",
                param=flag,
                code="queue_full",
            )
