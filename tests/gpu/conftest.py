"""The Triton kernels, against their naive twins.

Without a GPU they run in Triton's interpreter on CPU tensors. ``WEFT_TEST_DEVICE=cuda`` (``make test-gpu``)
runs the same tests compiled, on the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu import quick_interpreter
from weft.tensor import gpu
from weft.tensor.scratch import scratch

DEVICE = torch.device(os.environ.get("WEFT_TEST_DEVICE", "cpu"))

if gpu.INTERPRETED:
    quick_interpreter.install()

collect_ignore = [] if gpu.INTERPRETED and quick_interpreter.FITS else ["test_quick_interpreter.py"]


@pytest.fixture(autouse=True)
def triton_kernels() -> Iterator[None]:
    gpu.choose("triton")
    scratch.device = DEVICE  # of the twins
    yield
    gpu.choose("auto")
    scratch.device = torch.device("cpu")


@pytest.fixture
def device() -> torch.device:
    return DEVICE
