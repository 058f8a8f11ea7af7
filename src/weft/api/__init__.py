"""weft in one process, for programs: see ``engine``, and docs/python.md for users."""

from weft.api.engine import Completion, Engine

__all__ = ["Completion", "Engine"]
