"""``RecordingTarget``: where a server records its traffic. The engine process writes the file, by
``weft.rpc.recorder``.

The engine process reads it without the flags of the server, whose module imports most of the HTTP side.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordingTarget:
    """Where a recording of the traffic goes. ``has_tokens``: prompts and answers too, not only their
    hashes."""

    file: str
    limit_bytes: int
    has_tokens: bool = False
