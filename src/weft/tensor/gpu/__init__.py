"""The Triton kernels: whether a call can go to them.

    op/__init__ -- gpu.fits(...)? --+--> op/triton.py   one launch over the whole step
                                    '--> native, cpu    (the C++ kernels, torch)

They take tensors on a CUDA device. In a process started with ``TRITON_INTERPRET=1`` that chose "triton" by
name they take tensors on the CPU too, and run in Triton's interpreter: that is how they are tested without a
GPU, and far too slow for anything else. Triton is imported by the first op that uses it, not before.

``choose("torch")`` turns them off for the process: the twin to compare with on the same device.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import torch

from weft.errors import ConfigError

Choice = Literal["auto", "triton", "torch"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Read when this module is imported, as Triton reads it when a kernel is defined."""

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
"""Products and sums in one rounding, whatever a version of Triton takes for granted: read at its import."""

INSTALLED = importlib.util.find_spec("triton") is not None

_in_use = INSTALLED
_interpreting = False


def choose(choice: Choice) -> None:
    """For the whole process. Raises ConfigError for "triton" where it is not installed."""
    global _in_use, _interpreting
    if choice == "triton" and not INSTALLED:
        raise ConfigError("--gpu-kernels is triton, which is not installed; pip install 'weft[gpu]', or use "
                          "--gpu-kernels auto", param="--gpu-kernels")
    _in_use = INSTALLED and choice != "torch"
    _interpreting = INTERPRETED and choice == "triton"


def in_use() -> bool:
    return _in_use


def fits(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the Triton kernels are in use and can reach these: all on one CUDA device, or on the CPU under
    the interpreter."""
    return reaches(first.device) and all(other.device == first.device for other in others)


def reaches(device: torch.device) -> bool:
    """Whether the Triton kernels are in use and can reach what is on ``device``."""
    return _in_use and (device.type == "cuda" or _interpreting)
