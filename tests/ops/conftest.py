"""The files here test the torch path; ``test_native`` chooses the C++ kernels for itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from weft.tensor import native

# Without a compiler there are no kernels to test; with one, that they are missing is a failure there.
collect_ignore = (
    []
    if native.MISSING is None or shutil.which("c++")
    else [
        "test_native.py",
        "test_native_linear.py",
        "test_native_cache_dtypes.py",
        "test_native_layers.py",
        "test_native_threads.py",
        "test_native_chain.py",
        "test_native_adapters.py",
    ]
)


@pytest.fixture(autouse=True)
def torch_kernels() -> Iterator[None]:
    native.choose("torch")
    yield
    native.choose("auto")
