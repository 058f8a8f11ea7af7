"""What readers of tool calls give out: calls in parts, as a stream shows them.

    CallPart(name="get_time", arguments="")       a call begins
    CallPart(arguments='{"zone": ')               more of its arguments, JSON text
    CallPart(arguments='"UTC"}', complete=True)   it is whole

A reader takes the text between the markers of one envelope. It keeps all of that text and counts how much of
it has become calls. Text that turns out to be no call is shown as content, so no character is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(slots=True)
class CallPart:
    """``name`` is set on the first part of a call, ``complete`` on the last. ``call_id``: the one that the
    model gave it, where its family writes ids."""

    name: str | None = None
    arguments: str = ""
    complete: bool = False
    call_id: str | None = None


class BodyReader(ABC):
    """``close`` is the marker that ends the envelope, or None where the calls end by themselves.

    ``whole``: how many characters have become complete calls. ``emitted``: how many have been given out
    in parts. ``end``: where the envelope ended, once it has. ``broken``: what comes is not a call.
    """

    def __init__(self, close: str | None) -> None:
        self.close = close
        self.text = ""
        self.whole = 0
        self.emitted = 0
        self.end: int | None = None
        self.broken = False
        self.call_count = 0

    def push(self, text: str, *, last: bool = False) -> list[CallPart]:
        """``last``: nothing will follow. After it, ``end`` is set or ``broken`` is."""
        self.text += text
        parts = self._read(last)
        if last and self.end is None:
            self.broken = True
        return parts

    @abstractmethod
    def _read(self, last: bool) -> list[CallPart]:
        """Go on where the last call stopped."""

    def _completed(self, at: int) -> None:
        self.call_count += 1
        self.whole = self.emitted = at
