"""One way a Triton kernel is compiled, as plain data: what the ahead-of-time check goes through.

Each ``ops/<op>/triton.py`` lists those that a GPU would ask for as ``compilations()``, from the same table of
block sizes that its launches read. Nothing here imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Compilation:
    """``signature``: every argument's name -> its Triton type ("*bf16", "i32", "fp32"), "constexpr" for those
    that ``constants`` has the values of. ``kernel``: the jit function itself."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    oldest: int = 80
    """The compute capability (times ten) from which on it is asked for."""
