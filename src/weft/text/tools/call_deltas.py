"""What an answer's readers give out for calls of tools, in order.

    CallDelta(0, call_id="call_1", name="get_time")   call 0 begins
    CallDelta(0, arguments='{"zone": "UTC"}')         more of its arguments
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CallDelta:
    """What call number ``index`` gained; ``call_id`` and ``name`` are set on its first delta. With
    ``is_custom`` the call is whole, and ``arguments`` is the text of a custom tool."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    is_custom: bool = False
