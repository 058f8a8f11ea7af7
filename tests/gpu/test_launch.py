"""A kernel that does not fit a GPU runs with fewer stages; a grid beyond CUDA's axes is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from weft.tensor.gpu import KernelTooLargeError
from weft.tensor.gpu import launch as launching
from weft.tensor.gpu.launch import launch


class Kernel:
    """Fits with up to ``fits`` stages; notes the stages of every try."""

    __name__ = "kernel"

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.tries: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*args: Any, num_stages: int = 3, **constants: Any) -> None:
            self.tries.append(num_stages)
            if num_stages > self.fits:
                raise OutOfResources(100_000 * num_stages, 101_376, "shared memory")

        return start


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    launching._fitting_stages.clear()
    yield
    launching._fitting_stages.clear()


def test_a_kernel_that_does_not_fit_runs_with_fewer_stages_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel(fits=1)
    for _ in range(3):
        launch(kernel, (2, 1))(0, BLOCK=64, num_stages=4)
    assert kernel.tries == [4, 3, 2, 1, 1, 1], "what fits is remembered"
    [line] = [record.message for record in caplog.records]
    assert "kernel does not fit" in line
    assert "num_stages=1" in line
    launch(kernel, (2, 1))(0, BLOCK=128, num_stages=2)
    assert kernel.tries[6:] == [2, 1], "other constants are another kernel"


def test_a_kernel_that_fits_is_tried_once() -> None:
    kernel = Kernel(fits=4)
    launch(kernel, (1,))(num_stages=4)
    launch(kernel, (1,))()
    assert kernel.tries == [4, 3]
    assert not launching._fitting_stages


def test_a_kernel_that_never_fits_names_itself_and_a_way_out() -> None:
    with pytest.raises(KernelTooLargeError, match=r"kernel kernel .*101376.*debug\.gpu_kernels torch"):
        launch(Kernel(fits=0), (1,))(num_stages=2)


@pytest.mark.parametrize("grid", [(1, 65_536), (1, 2, 65_536), (2**31,)])
def test_a_grid_beyond_the_axes_of_a_gpu_is_caught(grid: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match=r"kernel has .*(65535|2147483648)"):
        launch(Kernel(fits=4), grid)
    launch(Kernel(fits=4), (2**31 - 1, 65_535, 65_535))
