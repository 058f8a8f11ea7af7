"""The files here test the torch path; ``test_native`` chooses the C++ kernels for itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from weft.tensor import native

OF_KERNELS = (
    "test_native.py",
    "test_native_adapters.py",
    "test_native_blocks.py",
    "test_native_cache_dtypes.py",
    "test_native_chain.py",
    "test_native_layers.py",
    "test_native_linear.py",
    "test_native_threads.py",
)
OF_TILES = (
    "test_coded_tiles.py",
    "test_native_expert_tiles.py",
    "test_native_matrix_unit.py",
    "test_native_unit_attention.py",
    "test_twelve_bit.py",
)


def untestable() -> tuple[str, ...]:
    """Return the files whose subject this machine cannot have: kernels without a compiler, tiles without AVX-512. Where
    there is a compiler and no kernels, these files fail (``empty_parameter_set_mark``)."""
    if native.MISSING is not None:
        return () if shutil.which("c++") else OF_KERNELS + OF_TILES
    return () if native.extension().has_coded_tiles() else OF_TILES


collect_ignore = list(untestable())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if collect_ignore:
        files = ", ".join(collect_ignore)
        terminalreporter.write_line(f"left out, as this machine has no compiler or no AVX-512: tests/ops {files}")


@pytest.fixture(autouse=True)
def torch_kernels() -> Iterator[None]:
    native.choose("torch")
    yield
    native.choose("auto")
