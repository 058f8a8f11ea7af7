"""Compiles every Triton kernel for GPUs ahead of time: a check for machines without a GPU.

    python -m tests.support.compile_gate              the largest shape of each kernel, for the GPUs in turn
    python -m tests.support.compile_gate --all        every shape that a kernel file lists, for each GPU
    python -m tests.support.compile_gate --front-end  no further than Triton's own code, TTIR: 4 seconds

    src/weft: @triton.jit; kernel_variants --> signature, constants --> cubin for each GPU
                                                                          shared memory <= an SM's
                                                                          registers spilled: reported

It finds errors that Triton's interpreter cannot find: types that do not match, and shapes that a tensor core does not
take. It also finds tiles that need more shared memory than a GPU has, which would fail at the first launch, and a fault
of ptxas 12.8 (``wrong_descriptors``). It checks neither results nor speed. It runs without TRITON_INTERPRET in a
separate process, because that variable is read when a kernel is defined. Triton caches compiled kernels
(TRITON_CACHE_DIR). To check another Triton, put it first in PYTHONPATH: the suite takes the lowest version that weft
promises (``lowest_triton``).
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import cycle
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import weft
from tests.support.kernel_variants.compilation import CAPABILITIES, PDL, SMALL_SHARED_BYTES, Compilation
from tests.support.kernel_variants.registry import VARIANTS
from weft.tensor.gpu.launch import SMALL_SHARED

SHARED_MAX_BYTES = dict.fromkeys(CAPABILITIES, SMALL_SHARED_BYTES) | {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability -> shared memory of one program."""
WARP_THREADS = 32
PROGRAMMATIC = 90
"""Capability from which on kernels wait for the one before them by an instruction."""
_DEFINES = re.compile(r"^@triton\.jit", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of one compilation. ``fault``: why the kernel cannot run on that GPU; None if it can.
    ``spilled_bytes``: registers of a thread that spill to memory; None if unknown."""

    name: str
    capability: int
    shared_bytes: int
    spilled_bytes: int | None
    seconds: float
    fault: str | None


def kernel_modules() -> list[ModuleType]:
    """Return the modules of weft that define Triton kernels; the rest of ``tensor/gpu`` is code that they share."""
    assert weft.__file__ is not None
    root = Path(weft.__file__).parent
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if (path.parent.name != "gpu" or path.stem.endswith("_kernels"))
        and _DEFINES.search(path.read_text(encoding="utf-8"))
    ]
    return [
        importlib.import_module(".".join(("weft", *path.relative_to(root).with_suffix("").parts))) for path in files
    ]


def compilations_of(module: ModuleType) -> list[Compilation]:
    """Return the variants of the kernels in ``module``. Raise KeyError for a kernel file that ``VARIANTS`` lacks."""
    listed = VARIANTS[module.__name__]()
    assert listed, f"{module.__name__} lists no compilation"
    return listed


def most_demanding(compilations: Sequence[Compilation]) -> list[Compilation]:
    """Return for each kernel function the variant with the largest tiles; of equals the one with most stages."""

    def size(one: Compilation) -> tuple[int, int]:
        tiles = [value for value in one.constants.values() if type(value) is int and value > 1]
        return prod(tiles), one.num_stages

    largest: dict[int, Compilation] = {}
    for one in compilations:
        held = largest.get(id(one.kernel))
        if held is None or size(one) > size(held):
            largest[id(one.kernel)] = one
    return list(largest.values())


def variants_for(listed: Sequence[Compilation], capability: int) -> list[Compilation]:
    """Return the variants that a GPU of ``capability`` launches."""
    return [
        one
        for one in listed
        if capability >= one.oldest
        and one.small_shared in (None, capability in SMALL_SHARED)
        and (one.only is None or capability in one.only)
    ]


def in_turn(listed: Sequence[Compilation], capabilities: Iterator[int]) -> list[tuple[Compilation, int]]:
    """Return the largest variant of each kernel, with the next of ``capabilities`` that launches it."""
    pairs = []
    for kernel in {id(one.kernel): one.kernel for one in listed}.values():
        variants = [one for one in listed if one.kernel is kernel]
        oldest = min(one.oldest for one in variants)
        capability = max(next(capabilities), oldest)
        largest = most_demanding(variants_for(variants, capability))
        pairs += [(one, capability) for one in largest]
    return pairs


def in_front(one: Compilation, capability: int) -> CompileResult:
    """Compile ``one`` from Python to Triton's own code, the part in which versions accept different programs."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    started, fault = time.perf_counter(), None
    source, target = _source(one, capability), _target(capability)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(_options(one))
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}".strip()
    return CompileResult(one.name, capability, 0, None, time.perf_counter() - started, fault)


def compiled(one: Compilation, capability: int) -> CompileResult:
    """Compile ``one`` for a GPU of ``capability`` down to machine code."""
    import triton

    started, shared, fault, spilled = time.perf_counter(), 0, None, None
    try:
        kernel = triton.compile(_source(one, capability), target=_target(capability), options=_options(one))
    except Exception as error:  # a compiler has many ways to refuse; each is a fault
        fault = f"{type(error).__name__}: {error}".strip()
    else:
        shared, spilled = int(kernel.metadata.shared), _spilled_bytes(kernel.asm["cubin"])
        # Only Hopper's products have descriptors, and the tool takes as long as a compilation.
        if "wgmma" in kernel.asm["ptx"] and (wrong := wrong_descriptors(_tool("-sass", kernel.asm["cubin"]))):
            fault = f"adds the low word of a descriptor to its high word: {wrong[0]}"
        waits = "griddepcontrol.wait" in kernel.asm["ptx"]
        if waits != (PDL in one.kernel.arg_names and capability >= PROGRAMMATIC):
            fault = f"{'waits' if waits else 'does not wait'} for the kernel before it"
        if shared > SHARED_MAX_BYTES[capability]:
            fault = f"takes {shared} bytes of shared memory, of {SHARED_MAX_BYTES[capability]}"
    return CompileResult(one.name, capability, shared, spilled, time.perf_counter() - started, fault)


def _source(one: Compilation, capability: int) -> Any:
    from triton.compiler import ASTSource

    signature, constants = one.signature, one.constants
    if PDL in one.kernel.arg_names:
        signature, constants = signature | {PDL: "constexpr"}, constants | {PDL: capability >= PROGRAMMATIC}
    return ASTSource(one.kernel, signature, constants, _aligned(one))


def _target(capability: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, WARP_THREADS)


def _options(one: Compilation) -> dict[str, int]:
    return {"num_warps": one.num_warps, "num_stages": one.num_stages}


def _spilled_bytes(cubin: bytes) -> int | None:
    """Return the stack bytes per thread of the machine code."""
    stack = re.search(r"STACK:(\d+)", _tool("-res-usage", cubin))
    return None if stack is None else int(stack[1])


def _tool(option: str, cubin: bytes) -> str:
    """Return the output of a tool that ships with Triton; empty if it does not run here."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            return subprocess.run(
                [knobs.nvidia.cuobjdump.path, option, file.name], check=True, capture_output=True, text=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):
            return ""


_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?) ;")
_TARGET = re.compile(r"(?:@!?U?P\d+ )?[A-Z0-9_.]+ (U?R\d+)")
_LOW_WORD = re.compile(r"U?IADD3 U?R\d+, (U?P\d), (U?R\d+)(?:\.reuse)?, 0x[0-9a-f]+, U?RZ")
_HIGH_WORD = re.compile(r"U?IADD3\.X U?R\d+, (U?R\d+)(?:\.reuse)?, -?0x[0-9a-f]{8}, U?RZ, (U?P\d), !U?PT")


def wrong_descriptors(sass: str) -> list[str]:
    """Return the instructions of Hopper's machine code that add one word to both halves of a 64-bit sum.

    A tensor-core product reads a descriptor: the address of a tile in shared memory, whose high word is 0, plus a
    constant of eight digits whose high word begins with the form of the tile. ptxas 12.8, of Triton 3.6, adds the
    low word to the high half too, in some products whose left side is in registers: for 4 warps in uniform
    registers, for 8 in the registers of threads. With 8 warps it uses R1, the address of the stack, as that of the
    tile. Such a product reads other memory: on an H200, Mamba-2 had wrong outputs or an illegal address.
    """
    low: dict[str, str] = {}
    """The register that was added, by the carry of the addition of low words."""
    wrong = []
    for instruction in _INSTRUCTION.findall(sass):
        if (match := _HIGH_WORD.match(instruction)) and low.get(match[2]) == match[1]:
            wrong.append(instruction)
        if match := _LOW_WORD.match(instruction):
            low[match[1]] = match[2]
        if target := _TARGET.match(instruction):  # that register has another value now
            low = {carry: word for carry, word in low.items() if word != target[1]}
    return wrong


def _aligned(one: Compilation) -> dict[tuple[int], list[list[str | int]]]:
    """Return the specialisation of a launch: addresses and counts are multiples of 16, so loads are vectorised and
    go through shared memory. Without it a kernel would need only a fraction of that memory."""
    return {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(one.signature.values())
        if kind.startswith("*") or kind in ("i32", "i64")
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every shape for every GPU")
    parser.add_argument("--front-end", action="store_true", help="no further than Triton's own code")
    parser.add_argument("--only", default="", help="modules with this in their name")
    args = parser.parse_args(argv)
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "interpreted kernels are not compiled"
    faults, capabilities = 0, cycle(SHARED_MAX_BYTES)
    for module in kernel_modules():
        if args.only not in module.__name__:
            continue
        listed = compilations_of(module)
        every = (
            [(one, capability) for capability in SHARED_MAX_BYTES for one in variants_for(listed, capability)]
            if args.all
            else in_turn(listed, capabilities)
        )
        for one, capability in every:
            outcome = (in_front if args.front_end else compiled)(one, capability)
            faults += outcome.fault is not None
            print(
                f"{module.__name__.removeprefix('weft.')}  {one.name}  sm_{capability}  "
                f"{outcome.shared_bytes / 1024:.0f} KiB shared  {outcome.spilled_bytes} B spilled  "
                f"{outcome.seconds:.1f} s  {outcome.fault or 'ok'}",
                flush=True,
            )
    print(f"{faults} faults, Triton {version('triton')}")
    return min(faults, 1)


if __name__ == "__main__":
    raise SystemExit(main())
