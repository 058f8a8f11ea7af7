"""The launches of recurrent Triton ops: block sizes, padded dims, and lists of compilations.

Block sizes come from small tables. Rejected: ``triton.autotune``. It calls the driver, so none of it runs in
the interpreter. It would also time kernels on the states of a server that has just started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from weft.tensor.gpu.compilation import Compilation

TYPES: dict[torch.dtype, str] = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
"""Dtypes of inputs and of states -> Triton's name of a pointer to them."""

_TABLES = {"slots": "*i64", "starts": "*i64"} | dict.fromkeys(
    ("fresh", "lengths", "offsets", "chunk_begin", "chunk_run", "chunk_first", "chunk_tokens", "chunk_tap"),
    "*i32")
STEP_TABLES = list(_TABLES)
"""Arguments that are views into the step's table. They begin anywhere, so kernels are not compiled again for
views at a multiple of 16 bytes (``do_not_specialize_on_alignment``)."""


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
