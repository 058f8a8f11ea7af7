"""The launch of a Triton kernel: its grid is checked, and a kernel that does not fit is tried again.

    launch(kernel, grid)(*arguments, **constants)
        grid            x up to 2^31 - 1 programs; y and z up to 65,535
        OutOfResources  one stage fewer, and again, down to one; a line in the log

The compile gate knows some GPUs and two versions of Triton. On another GPU, or with another version, a kernel
may not fit. Stages of a pipeline are copies of the tiles in flight: they fill shared memory. A kernel with
fewer stages has the same tiles, adds in the same order and gives the same bits; it waits longer for memory.
The number that fits is remembered for that kernel and its constants.

The check comes first at the start of a server, where each shape of a step is computed (``runner.reserve``).
So no request waits for the second compilation, and no graph is being recorded. A kernel that does not fit
with one stage ends with ``KernelTooLargeError``; the start then goes on without Triton (``assemble``).

Rejected: smaller tiles here (the grid and the order of sums follow from the tiles: only the kernel's own file
can choose others); a table of GPUs alone (it knows no GPU of next year).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from triton.runtime.errors import OutOfResources

from weft.tensor.gpu import KernelTooLargeError
from weft.tensor.gpu.runs import GRID_YZ_MAX

GRID_X_MAX = 2**31 - 1
STAGES = 3
"""Triton's number of stages where a launch names none."""

_log = logging.getLogger("weft")
_fitting_stages: dict[tuple[Any, ...], int] = {}


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """``kernel[grid]``. Raises KernelTooLargeError from the call."""
    assert grid[0] <= GRID_X_MAX, f"{kernel.__name__} has {grid[0]} programs along x"
    assert max(grid[1:], default=0) <= GRID_YZ_MAX, (
        f"{kernel.__name__} has a grid of {grid}: at most {GRID_YZ_MAX} programs along y and z")
    start = kernel[grid]

    def run(*arguments: Any, **constants: Any) -> None:
        if _fitting_stages:
            stages = _fitting_stages.get(_key(kernel, constants))
            if stages is not None:
                constants = constants | {"num_stages": stages}
        try:
            start(*arguments, **constants)
        except OutOfResources as error:
            _run_smaller(kernel, start, arguments, constants, error)

    return run


def _run_smaller(kernel: Any, start: Callable[..., None], arguments: tuple[Any, ...],
                 constants: dict[str, Any], error: OutOfResources) -> None:
    for stages in range(constants.get("num_stages", STAGES) - 1, 0, -1):
        try:
            start(*arguments, **constants | {"num_stages": stages})
        except OutOfResources as again:
            error = again
            continue
        _fitting_stages[_key(kernel, constants)] = stages
        _log.warning("kernel %s does not fit the GPU as planned; it runs with num_stages=%d and may be "
                     "slower: %s", kernel.__name__, stages, error)
        return
    raise KernelTooLargeError(f"kernel {kernel.__name__} does not fit the GPU: {error}. Use "
                              "debug.gpu_kernels "
                              "torch") from error


def _key(kernel: Any, constants: dict[str, Any]) -> tuple[Any, ...]:
    return kernel, *sorted((name, str(value)) for name, value in constants.items() if name != "num_stages")
