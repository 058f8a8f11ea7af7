"""Choice of the Triton kernels, and whether a call can use them.

    tensor.op -- gpu.reaches(device)? --+--> kernels/<op>.py   one launch over the whole step
                                        '--> the C++ kernels, torch

The kernels take tensors on a CUDA device. In a process started with ``TRITON_INTERPRET=1`` that chose
"triton" by name they also take tensors on the CPU. That is for tests: they run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Literal

import torch

from weft.errors import ConfigError
from weft.spec import KvLayoutName

Choice = Literal["auto", "triton", "torch"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels are interpreted: read when this module is imported, as Triton reads it when a kernel is defined."""

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
"""Fused multiply-add, whatever a version of Triton defaults to; Triton reads it at import."""

INSTALLED = importlib.util.find_spec("triton") is not None


class KernelTooLargeError(RuntimeError):
    """Error of a kernel that needs more of a multiprocessor than the GPU has, even with one stage."""


class KernelsDifferError(RuntimeError):
    """Error of kernels that compute other numbers than torch's operators on this GPU."""


_in_use = INSTALLED
_interpreting = False
_joined = True


def choose(choice: Choice, *, joined: bool = True) -> None:
    """Choose for the entire process. ``joined``: small kernels may share a launch (``joins``). Raises ConfigError for
    "triton" where it is not installed.
    """
    global _in_use, _interpreting, _joined
    if choice == "triton" and not INSTALLED:
        raise ConfigError(
            "debug.gpu_kernels is triton, which is not installed; pip install "
            "'weft[gpu]', or use "
            "debug.gpu_kernels auto",
            param="debug.gpu_kernels",
        )
    _in_use = INSTALLED and choice != "torch"
    _interpreting = INTERPRETED and choice == "triton"
    _joined = joined


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Inside, no op takes its Triton form, in the entire process."""
    global _in_use
    before, _in_use = _in_use, False
    try:
        yield
    finally:
        _in_use = before


def in_use() -> bool:
    return _in_use


def joins(device: torch.device) -> bool:
    """Return whether small kernels for tensors on ``device`` share a launch where they can. Each number is computed by
    the same operations, so no bit of it changes.
    """
    return _joined and reaches(device)


def interpreting() -> bool:
    """Return whether the Triton kernels serve the CPU, in Triton's interpreter."""
    return _interpreting


def fits(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether the Triton kernels are in use and can read these tensors: all on one CUDA device, or on the CPU
    under the interpreter.
    """
    return reaches(first.device) and all(other.device == first.device for other in others)


def reaches(device: torch.device) -> bool:
    """Return whether the Triton kernels are in use and can read tensors on ``device``."""
    return _in_use and (device.type == "cuda" or _interpreting)


def page_layout(device: torch.device) -> KvLayoutName:
    """Return the order of numbers in KV pages on ``device``. The Triton kernels read rows, those in C++ packed blocks,
    torch's operators both.
    """
    return "rows" if device.type == "cuda" or reaches(device) else "vnni"
