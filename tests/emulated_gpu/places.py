"""Which line of the product asked for something."""

from __future__ import annotations

import functools
import sys

_OURS = "/tests/emulated_gpu/"
_LAUNCHER = "/tensor/gpu/launch.py"


def place_of_caller() -> str:
    """The innermost line of weft; without one, of whoever is neither torch, Triton nor the emulation."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_weft(path):
            return f"{path.rpartition('/src/')[2]}:{frame.f_lineno}"
        if not other and _is_outside(path):
            other = f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other


@functools.cache
def _is_weft(path: str) -> bool:
    return "/src/weft/" in path and not path.endswith(_LAUNCHER)


@functools.cache
def _is_outside(path: str) -> bool:
    name = path.rpartition("/")[2]
    ours = _OURS in path and not name.startswith("test_")
    return not ours and "/torch/" not in path and "/triton/" not in path and "/lib/python" not in path
