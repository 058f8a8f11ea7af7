"""weft in one process, for programs: see ``engine``, and docs/python.md for users."""

from weft.api.completion import ChatReply, Completion
from weft.api.engine import Engine

__all__ = ["ChatReply", "Completion", "Engine"]
