"""What tests of the runner share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from weft.tensor import gpu, native

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """The Triton kernels on tensors of the CPU, and none of those in C++."""
    gpu.choose("triton")
    native.choose("torch")
    yield
    native.choose("auto")
    gpu.choose("auto")
