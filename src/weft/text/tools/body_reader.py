"""What readers of tool calls give out: calls in deltas, as a stream shows them.

    CallDelta(name="get_time")                     a call begins
    CallDelta(arguments='{"zone": ')               more of its arguments, JSON text
    CallDelta(arguments='"UTC"}', complete=True)   it is whole

A reader takes the text between the markers of one envelope. It keeps all of that text and counts how much of
it has become calls. Text that turns out to be no call is shown as content, so no character is lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(slots=True)
class CallDelta:
    """What a call gained. ``name`` is set on its first delta, ``complete`` on its last. ``call_id`` comes
    with the name: the model's own where its family writes ids. ``index`` numbers the calls of an answer.
    With ``is_custom``, ``arguments`` is the text of a custom tool."""

    index: int = -1
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    is_custom: bool = False
    complete: bool = False


class BodyReader(ABC):
    """``close`` is the marker that ends the envelope, or None where the calls end by themselves.

    ``whole``: how many characters have become complete calls. ``emitted``: how many have been given out
    in deltas. ``end``: where the envelope ended, once it has. ``broken``: what comes is not a call.
    """

    def __init__(self, close: str | None) -> None:
        self.close = close
        self.text = ""
        self.whole = 0
        self.emitted = 0
        self.end: int | None = None
        self.broken = False
        self.call_count = 0

    def push(self, text: str, *, last: bool = False) -> list[CallDelta]:
        """``last``: nothing will follow. After it, ``end`` is set or ``broken`` is."""
        self.text += text
        deltas = self._read(last)
        if last and self.end is None:
            self.broken = True
        return deltas

    @abstractmethod
    def _read(self, last: bool) -> list[CallDelta]:
        """Go on where the last call stopped."""

    def _completed(self, at: int) -> None:
        self.call_count += 1
        self.whole = self.emitted = at
