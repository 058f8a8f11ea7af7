"""Launches of Triton kernels: block sizes, grids that are checked, and what a GPU would compile.

    launch(kernel, grid)(*arguments, **constants)
        grid            x up to 2^31 - 1 programs; y and z up to 65,535
        OutOfResources  one stage fewer, and again, down to one; a line in the log

The compile gate knows some GPUs and two versions of Triton. On another GPU, or with another version, a kernel
may not fit. Stages of a pipeline are copies of the tiles in flight. A kernel with fewer stages has the same
tiles, adds in the same order and gives the same bits; it waits longer for memory.

Each shape of a step is computed at the start of a server (``runner.reserve``), so no request waits for the
second compilation. A kernel that does not fit with one stage ends with ``KernelTooLargeError``; the start
then goes on without Triton (``assemble``).

Block sizes come from small tables. Each kernel file lists the variants that a GPU would compile, from the
same table, as ``compilations()``: the check ahead of time reads them.

Rejected: smaller tiles here (the grid and the order of sums follow from the tiles). ``triton.autotune``: it
calls the driver, so none of it runs in the interpreter, and it would time kernels on the states of a server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from weft.tensor.gpu import KernelTooLargeError
from weft.tensor.gpu.runs import GRID_YZ_MAX

GRID_X_MAX = 2**31 - 1
STAGES = 3
"""Triton's number of stages where a launch names none."""

_log = logging.getLogger("weft")
_fitting_stages: dict[tuple[Any, ...], int] = {}

SMALL_SHARED_BYTES = 99 * 1024
"""Shared memory of one program on GPUs without a data-centre die."""
SMALL_SHARED = frozenset({86, 89, 120, 121})
"""Their compute capabilities, times ten."""
CAPABILITIES = (80, 90, 86, 89, 120, 100)
"""Those that the compile gate knows: A100, H100, RTX 30, RTX 40 and L40, RTX 50, B200."""

TYPES: dict[torch.dtype, str] = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
"""Dtypes of inputs and of states -> Triton's name of a pointer to them."""

_TABLES = {"slots": "*i64", "starts": "*i64"} | dict.fromkeys(
    ("fresh", "lengths", "offsets", "chunk_begin", "chunk_run", "chunk_first", "chunk_tokens", "chunk_tap"),
    "*i32")
STEP_TABLES = list(_TABLES)
"""Arguments that are views into the step's table. They begin anywhere, so kernels are not compiled again for
views at a multiple of 16 bytes (``do_not_specialize_on_alignment``)."""


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """``kernel[grid]``. Raises KernelTooLargeError from the call."""
    assert grid[0] <= GRID_X_MAX, f"{kernel.__name__} has {grid[0]} programs along x"
    assert max(grid[1:], default=0) <= GRID_YZ_MAX, (
        f"{kernel.__name__} has a grid of {grid}: at most {GRID_YZ_MAX} programs along y and z")
    start = kernel[grid]

    def run(*arguments: Any, **constants: Any) -> None:
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


@dataclass(frozen=True, slots=True)
class Compilation:
    """One variant of a kernel. ``signature``: every argument's name -> its Triton type ("*bf16", "i32",
    "fp32"), or "constexpr" for a name in ``constants``. ``kernel``: the jit function."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    oldest: int = 80
    """The lowest compute capability (times ten) that uses this variant."""
    small_shared: bool | None = None
    """True: for GPUs with SMALL_SHARED_BYTES of shared memory; False: for the others; None: for all."""
    only: frozenset[int] | None = None
    """Of CAPABILITIES those that use this variant; None: all that the two fields above admit."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a kernel: ``width`` of the blocked dim in one program, warps, stages of its pipeline."""

    width: int
    warps: int = 4
    stages: int = 1


def padded(size: int) -> int:
    """The power of two to which a dim is padded; products need at least 16."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy where its last dim is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def compilation_of(name: str, kernel: Any, pointers: Mapping[str, str], constants: Mapping[str, Any],
                   blocks: Blocks, floats: tuple[str, ...] = ("scale",)) -> Compilation:
    """``pointers``: types of the tensor arguments that are not step tables. Any other argument is an int32,
    unless it is a constant or one of ``floats``; ``slot_stride`` is an int64."""
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in floats:
            signature[argument] = "fp32"
        else:
            signature[argument] = pointers.get(argument) or _TABLES.get(argument) or (
                "i64" if argument == "slot_stride" else "i32")
    return Compilation(name, kernel, signature, dict(constants), num_warps=blocks.warps,
                       num_stages=blocks.stages)
