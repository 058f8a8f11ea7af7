"""Stop strings that do not count in the reasoning of an answer.

    text --StopScope--> content --StopStrings--> where the answer ends
      \\------------------------(wait)-------------> text to show

A client's stop strings end the answer, not the thoughts before it: a model that repeats the question while it reasons
would otherwise end without an answer. Nor do they count in the markers around reasoning, or in headers of messages. The
readers of the answer decide what is content, so both agree on every text.
"""

from __future__ import annotations

from typing import Protocol

from weft.text.channels import MessageReader
from weft.text.choices import StopStrings
from weft.text.reasoning import ReasoningSplitter


class StopScope(Protocol):
    """Interface to the part of an answer's text in which stop strings count."""

    def content(self, text: str) -> str:
        """Add new text of the answer, and return the content that it completes."""

    def rest(self) -> str:
        """End the answer, and return the content that was not classified."""

    @property
    def held_chars(self) -> int:
        """Number of characters at the end of the text so far that are not classified yet."""


class AfterReasoning:
    """The content that ``splitter`` finds."""

    def __init__(self, splitter: ReasoningSplitter) -> None:
        self._splitter = splitter

    @property
    def held_chars(self) -> int:
        return self._splitter.held_chars

    def content(self, text: str) -> str:
        parts = [self._splitter.push(text).content]
        while self._splitter.has_more:
            parts.append(self._splitter.push("").content)
        return "".join(parts)

    def rest(self) -> str:
        return self._splitter.finish().content


class InMessages(MessageReader):
    """The bodies of messages that are text or calls."""

    _bodies = ""

    def content(self, text: str) -> str:
        self.push(text)
        bodies, self._bodies = self._bodies, ""
        return bodies

    def rest(self) -> str:
        self.finish(is_cut=True)
        return self._bodies

    def _say(self, text: str) -> None:
        if self.kind in ("text", "call"):
            self._bodies += text
        super()._say(text)


class ScopedStops:
    """The stop strings ``stops``, which count only in the content of ``scope``. The methods are those of
    ``StopStrings``."""

    def __init__(self, stops: StopStrings, scope: StopScope) -> None:
        self._stops = stops
        self._scope = scope
        self._waiting = ""
        """Text that is not shown yet. It ends with the text that ``scope``, then ``stops``, holds back."""

    @property
    def stopped(self) -> str | None:
        return self._stops.stopped

    def push(self, text: str) -> str:
        return "" if self.stopped is not None else self._shown(text, self._scope.content(text))

    def skip(self, text: str) -> str:
        self._scope.content(text)
        return self._shown(text, "")

    def flush(self) -> str:
        if self.stopped is not None:
            return ""
        shown = self._shown("", self._scope.rest(), is_last=True)
        return shown if self.stopped is not None else shown + self._waiting

    def _shown(self, text: str, content: str, *, is_last: bool = False) -> str:
        """Return the text that is now safe to show, up to the end of the answer if a stop string ends in
        ``content``."""
        self._waiting += text
        unshown = self._stops.held_chars + len(content)
        unshown -= len(self._stops.push(content))
        if not is_last:
            unshown += self._scope.held_chars
        end = len(self._waiting) - unshown
        shown, self._waiting = self._waiting[:end], self._waiting[end:]
        return shown
