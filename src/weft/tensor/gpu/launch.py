"""Launches of Triton kernels: block sizes, checked grids, and the kernels that a GPU would compile.

    launch(kernel, grid)(*arguments, **constants)
        grid            x up to 2^31 - 1 programs; y and z up to 65,535
        OutOfResources  one stage fewer, and again, down to one; a line in the log

The compile gate knows some GPUs and two versions of Triton. On another GPU, or with another version, a kernel
may not fit. Stages of a pipeline are copies of the tiles in flight. A kernel with fewer stages has the same
tiles, adds in the same order and gives the same bits; it waits longer for memory.

Each shape of a step is computed at the start of a server (``runner.reserve``), so no request waits for the
second compilation. A kernel that does not fit with one stage ends with ``KernelTooLargeError``; the start
then goes on without Triton (``assemble``).

Kernels with a parameter PDL may be launched programmatically (``choose_programmatic``): the GPU places the programs of
such a kernel while those of the one before still run, and they wait for its end in their first statement
(``products.after_previous``). That hides a launch and the end of a grid, some microseconds a layer. Between two kernels
without it, and around torch's own, the order is that of the stream as ever.

Block sizes come from small tables in the kernel files. ``tests/support/kernel_variants`` lists the kernels that a GPU
would compile with them, for a check ahead of time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import triton
from triton.runtime.errors import OutOfResources

from weft.errors import ConfigError
from weft.tensor.gpu import INTERPRETED, KernelTooLargeError
from weft.tensor.gpu.runs import GRID_YZ_MAX

GRID_X_MAX = 2**31 - 1
STAGES = 3
"""Triton's number of stages if a launch names none."""

_log = logging.getLogger("weft")
_fitting_stages: dict[tuple[Any, ...], int] = {}
compiles_only = False
"""Whether launches are only compiled, not computed: set by ``ahead``, at a start."""

programmatic = False
"""Whether kernels with a parameter PDL are launched before the end of the kernel before them."""
PROGRAMMATIC_OLDEST = (9, 0)

SMALL_SHARED = frozenset({86, 89, 120, 121})
"""Compute capabilities, times ten, whose programs have 99 KiB of shared memory: no data-centre dies."""
STEP_TABLES = [
    "slots",
    "starts",
    "fresh",
    "lengths",
    "offsets",
    "chunk_begin",
    "chunk_run",
    "chunk_first",
    "chunk_tokens",
    "chunk_tap",
]
"""Arguments that are views into the step's table. Their addresses vary, so kernels are not compiled again for views at
a multiple of 16 bytes (``do_not_specialize_on_alignment``).
"""


def choose_programmatic(choice: Literal["on", "off"], capability: tuple[int, int] | None) -> None:
    """Choose for the entire process. ``capability``: of its GPU, None without one. Raises ConfigError for "on" on a GPU
    without programmatic launches.
    """
    global programmatic
    programmatic = choice == "on"
    if programmatic and (capability is None or capability < PROGRAMMATIC_OLDEST):
        programmatic = False
        raise ConfigError(
            "debug.programmatic_launches is on, which needs a GPU of capability 9.0 or newer",
            param="debug.programmatic_launches",
        )


def _of_launch(kernel: Any) -> dict[str, bool]:
    """Return the constants and options of ``kernel`` that the way of launching decides."""
    if "PDL" not in getattr(kernel, "arg_names", ()):
        return {}
    return {"PDL": True, "launch_pdl": True} if programmatic and not INTERPRETED else {"PDL": programmatic}


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return ``kernel[grid]``. Its call raises KernelTooLargeError."""
    assert grid[0] <= GRID_X_MAX, f"{kernel.__name__} has {grid[0]} programs along x"
    assert max(grid[1:], default=0) <= GRID_YZ_MAX, (
        f"{kernel.__name__} has a grid of {grid}: at most {GRID_YZ_MAX} programs along y and z"
    )
    chosen = _of_launch(kernel)
    if compiles_only:
        return partial(kernel.run, grid=grid, warmup=True, **chosen)
    start = kernel[grid]

    def run(*arguments: Any, **constants: Any) -> None:
        constants |= chosen
        # The number of stages that fitted is remembered: the next launch does not fail first.
        if _fitting_stages:
            stages = _fitting_stages.get(_key(kernel, constants))
            if stages is not None:
                constants = constants | {"num_stages": stages}
        try:
            start(*arguments, **constants)
        except OutOfResources as error:
            _run_smaller(kernel, start, arguments, constants, error)

    return run


def _run_smaller(
    kernel: Any,
    start: Callable[..., None],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    error: OutOfResources,
) -> None:
    for stages in range(constants.get("num_stages", STAGES) - 1, 0, -1):
        try:
            start(*arguments, **constants | {"num_stages": stages})
        except OutOfResources as again:
            error = again
            continue
        _fitting_stages[_key(kernel, constants)] = stages
        _log.warning(
            "kernel %s does not fit the GPU as planned; it runs with num_stages=%d and may be slower: %s",
            kernel.__name__,
            stages,
            error,
        )
        return
    raise KernelTooLargeError(
        f"kernel {kernel.__name__} does not fit the GPU: {error}. Use debug.gpu_kernels torch"
    ) from error


def _key(kernel: Any, constants: dict[str, Any]) -> tuple[Any, ...]:
    return kernel, *sorted((name, str(value)) for name, value in constants.items() if name != "num_stages")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes of a kernel: ``width`` of the blocked dim in one program, warps, stages of its pipeline."""

    width: int
    warps: int = 4
    stages: int = 1


def padded(size: int) -> int:
    """Return the power of two to which a dim is padded; products need at least 16."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if its last dim is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
