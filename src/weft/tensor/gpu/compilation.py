"""One variant of a Triton kernel, as plain data: an input of the ahead-of-time check.

Each ``kernels/<op>.py`` lists the variants that a GPU would compile as ``compilations()``, from the same
table of block sizes as its launches. Nothing here imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SMALL_SHARED_BYTES = 99 * 1024
"""Shared memory of one program on GPUs without a data-centre die."""
SMALL_SHARED = frozenset({86, 89, 120, 121})
"""Their compute capabilities, times ten."""
CAPABILITIES = (80, 90, 86, 89, 120, 100)
"""Those that the compile gate knows: A100, H100, RTX 30, RTX 40 and L40, RTX 50, B200."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """``signature``: every argument's name -> its Triton type ("*bf16", "i32", "fp32"), or "constexpr" for a
    name in ``constants``. ``kernel``: the jit function."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    oldest: int = 80
    """The lowest compute capability (times ten) that uses this variant."""
    small_shared: bool | None = None
    """True: for GPUs with SMALL_SHARED_BYTES of shared memory; False: for the others; None: for all."""
    only: frozenset[int] | None = None
    """Of CAPABILITIES those that use this variant; None: all that the two fields above admit."""
