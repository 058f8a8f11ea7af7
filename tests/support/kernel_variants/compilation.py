"""A variant of a kernel, as the compile gate takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from weft.tensor.gpu.launch import STEP_TABLES, Blocks

SMALL_SHARED_BYTES = 99 * 1024
"""Shared memory of one program on the GPUs of ``launch.SMALL_SHARED``."""
CAPABILITIES = (80, 90, 86, 89, 120, 100)
"""Those that the compile gate knows: A100, H100, RTX 30, RTX 40 and L40, RTX 50, B200."""
TYPES: dict[torch.dtype, str] = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
"""Dtypes of inputs and of states -> Triton's name of a pointer to them."""
TRITON_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "u8",
}
"""Triton's types of pages; fp8 is passed as bytes."""
_TABLES = dict.fromkeys(STEP_TABLES, "*i32") | {"slots": "*i64", "starts": "*i64"}


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
    """The CAPABILITIES that use this variant; None: all that the two fields above admit."""


PDL = "PDL"
"""A constant that the GPU decides, not the variant: kernels that have it are launched programmatically from 9.0 on."""
Choice = TypeVar("Choice")


def by_choice(choose: Callable[[int], Choice]) -> list[tuple[Choice, frozenset[int]]]:
    """Return the choices of ``choose``, each with the capabilities that get it."""
    chosen: dict[str, tuple[Choice, set[int]]] = {}
    for capability in CAPABILITIES:
        choice = choose(capability)
        chosen.setdefault(repr(choice), (choice, set()))[1].add(capability)
    return [(choice, frozenset(capabilities)) for choice, capabilities in chosen.values()]


def compilation_of(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    blocks: Blocks,
    floats: tuple[str, ...] = ("scale",),
    *,
    only: frozenset[int] | None = None,
) -> Compilation:
    """Return a variant. ``pointers``: types of the tensor arguments that are not step tables. Any other argument is
    an int32, unless it is a constant or one of ``floats``; ``slot_stride`` is an int64.
    """
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants or argument == PDL:
            signature[argument] = "constexpr"
        elif argument in floats:
            signature[argument] = "fp32"
        else:
            signature[argument] = (
                pointers.get(argument) or _TABLES.get(argument) or ("i64" if argument == "slot_stride" else "i32")
            )
    return Compilation(
        name, kernel, signature, dict(constants), num_warps=blocks.warps, num_stages=blocks.stages, only=only
    )


def page_signature(dtype: torch.dtype) -> tuple[dict[str, str], dict[str, object]]:
    """Return the part of a signature that ``pages_of`` fills, and its constants."""
    kind = "*" + TRITON_TYPES[dtype]
    signature = {"cache_k": kind, "cache_v": kind, "k_stride": "i32", "v_stride": "i32"}
    scaled = dtype == torch.int8
    signature |= {"scales": "*bf16" if scaled else "constexpr", "scale_stride": "i32", "scale_part": "i32"}
    return signature, {} if scaled else {"scales": None}


PLACE_SIGNATURE = {
    "positions": "*i64",
    "table": "*i32",
    "table_stride": "i32",
    "chunk_run": "*i32",
    "chunk_first": "*i32",
    "chunk_tokens": "*i32",
    "decode_count": "i32",
}
