"""A kernel that does not fit a GPU runs with fewer stages; a grid beyond CUDA's axes is caught."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from tests.support.compile_gate import kernel_modules
from weft.errors import ConfigError
from weft.tensor.gpu import KernelTooLargeError, softmax
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


class Noting:
    """Notes the constants and options of its launches."""

    __name__ = "kernel"

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = [*arg_names]
        self.noted: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.noted.append(constants)

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> None:
        self.noted.append(constants)


@pytest.fixture
def programmatic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    launching.choose_programmatic("on", (9, 0))
    yield
    launching.choose_programmatic("off", None)


@pytest.mark.usefixtures("programmatic")
def test_only_kernels_that_wait_are_launched_programmatically(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, other = Noting("x", "BLOCK", "PDL"), Noting("x", "BLOCK")
    for compiles_only in (False, True):
        monkeypatch.setattr(launching, "compiles_only", compiles_only)
        launch(waiting, (1,))(0, BLOCK=64)
        launch(other, (1,))(0, BLOCK=64)
    assert waiting.noted == [{"BLOCK": 64, "PDL": True, "launch_pdl": True}] * 2, "compiled ahead as it is launched"
    assert other.noted == [{"BLOCK": 64}] * 2
    launching.choose_programmatic("off", (9, 0))
    launch(waiting, (1,))(0, BLOCK=64)
    assert waiting.noted[-1] == {"BLOCK": 64, "PDL": False}


@pytest.mark.parametrize("capability", [None, (8, 9)])
def test_a_gpu_without_programmatic_launches_refuses_them(capability: tuple[int, int] | None) -> None:
    with pytest.raises(ConfigError, match="a GPU of capability"):
        launching.choose_programmatic("on", capability)
    assert not launching.programmatic
    launching.choose_programmatic("off", capability)


def programmatic_kernels() -> list[Any]:
    every = [one for module in (*kernel_modules(), softmax) for one in vars(module).values()]
    found = {id(one): one for one in every if "PDL" in getattr(one, "arg_names", ())}
    return [one for one in found.values() if one.fn.__name__ != "after_previous"]


def waits_first(source: str) -> bool:
    """Whether the first statement behind the docstring waits for the kernel before."""
    [kernel] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(kernel, ast.FunctionDef)
    body = kernel.body[1:] if ast.get_docstring(kernel) is not None else kernel.body
    return ast.unparse(body[0]) == "after_previous(PDL)"


def test_a_programmatic_kernel_waits_before_it_does_anything_else() -> None:
    kernels = programmatic_kernels()
    assert len(kernels) >= 9
    late = [one.fn.__name__ for one in kernels if not waits_first(inspect.getsource(one.fn))]
    assert not late
    assert not waits_first("def kernel(x, PDL):\n    row = tl.load(x)\n    after_previous(PDL)"), "the control"
