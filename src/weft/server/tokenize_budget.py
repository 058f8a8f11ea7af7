"""How many characters are tokenized at once.

a long text --spending--> a thread --> tokens
                                      |
                  too many alone: 413; too many beside others: 503
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weft.errors import QueueFullError, RequestError


class TextTooLongError(RequestError):
    """The text is over limits.max_tokenize_chars."""

    status = 413


class TokenizeBudget:
    """How many characters are tokenized at once, over all requests (law L11): it takes a second of a core for
    each megabyte, and the engine needs the cores. Short texts are not counted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0

    @contextlib.contextmanager
    def spending(self, count: int) -> Iterator[None]:
        """Raises TextTooLongError, QueueFullError."""
        if count > self._limit:
            raise TextTooLongError(
                f"the text has {count} characters; the limit is {self._limit} (limits.max_tokenize_chars)",
                param="prompt",
                code="text_too_long",
            )
        if self._spent + count > self._limit:
            raise QueueFullError(
                f"{self._spent} characters of other requests are being tokenized, and this "
                f"text has {count}; the limit is {self._limit} "
                "(limits.max_tokenize_chars). Try "
                "again later",
                param="limits.max_tokenize_chars",
                code="queue_full",
            )
        self._spent += count
        try:
            yield
        finally:
            self._spent -= count
