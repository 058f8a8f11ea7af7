"""Every Triton kernel compiles for the GPUs it is made for, with the shared memory that they have.

In a process of its own: this one interprets kernels, which is decided where they are defined.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import compile_gate, lowest_triton
from tests.support.compile_gate import (
    SHARED_MAX_BYTES,
    compilations_of,
    in_turn,
    kernel_modules,
    most_demanding,
    variants_for,
)
from tests.support.kernel_variants.compilation import Compilation
from weft.tensor.gpu.launch import SMALL_SHARED

COMPILED = Path(__file__).resolve().parents[2] / "build" / "triton"
"""Triton's cache: its keys are the source of a kernel and of all that it calls, the shape, the GPU and the
version of Triton. What has not changed is compiled once on a machine, which takes 45 seconds of CPU."""
KERNELS_KEPT = 600


def gate(*options: str, lowest: bool) -> str:
    """What the gate prints under the lowest Triton or the installed one."""
    before = [str(lowest_triton.directory())] if lowest else []
    variables = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(COMPILED),
        "PYTHONPATH": os.pathsep.join([*before, os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_gate", *options],
        env=variables,
        check=False,
        capture_output=True,
        text=True,
    )
    faults = [line for line in ran.stdout.splitlines() if " sm_" in line and not line.endswith(" ok")]
    assert not faults, "\n".join(faults)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_kernel_compiles_under_the_lowest_triton_for_a_gpu_that_it_is_made_for() -> None:
    """Each at its largest, for one of them in turn; ``make compile-gpu`` is the whole table, in minutes."""
    if COMPILED.exists() and len(list(COMPILED.iterdir())) > KERNELS_KEPT:
        shutil.rmtree(COMPILED)
    told = gate(lowest=True)
    assert f"Triton {lowest_triton.lowest_version()}." in told
    counts = [told.count(f" sm_{capability} ") for capability in SHARED_MAX_BYTES]
    assert sum(counts) >= len(kernel_modules())
    assert max(counts) - min(counts) <= 2  # a kernel of newer GPUs alone leaves an older one's turn out


def test_the_installed_triton_takes_every_kernel_too() -> None:
    """Versions differ in what they take of Python; ``make compile-gpu`` goes on to machine code."""
    told = gate("--front-end", lowest=False)
    assert f"Triton {version('triton')}" in told
    assert told.count(" ok\n") >= len(kernel_modules())


@pytest.mark.parametrize(("register", "carry"), [("UR", "UP"), ("R", "P")])
def test_a_sum_that_adds_its_low_word_to_its_high_word_is_seen(register: str, carry: str) -> None:
    """Lines of Mamba-2's outputs by Triton 3.6, of 4 warps and of 8. The controls: the register was set to
    another value; the high word has a register of its own; a sum of an address and a small number."""
    r, p = register, carry
    low = f"        /*5d70*/         {r[:-1]}IADD3 {r}4, {p}1, {r}1, 0x40, {r}Z ;     /* 0x00000 */"
    high = f"        /*5d80*/         {r[:-1]}IADD3.X {r}5, {r}1, -0x7fffffe0, {r}Z, {p}1, !{p}T ;   /* 0x8 */"
    between = f"        /*5d78*/         {r[:-1]}MOV {r}1, {r}Z ;        /* 0x0000003f00057c82 */"
    assert len(compile_gate.wrong_descriptors("\n".join([low, high]))) == 1
    assert compile_gate.wrong_descriptors("\n".join([low, between, high])) == []
    assert compile_gate.wrong_descriptors("\n".join([low, high.replace(f"{r}1,", f"{r}2,")])) == []
    assert compile_gate.wrong_descriptors("\n".join([low, high.replace("-0x7fffffe0", "0x7")])) == []


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_kernel_has_a_variant_for_every_gpu(capability: int) -> None:
    """GPUs with 99 KiB of shared memory have variants of their own where the others would not fit."""
    assert capability in SHARED_MAX_BYTES
    for module in kernel_modules():
        listed = compilations_of(module)
        chosen = variants_for(listed, capability)
        launched = {id(one.kernel) for one in listed if one.oldest <= capability}
        assert {id(one.kernel) for one in chosen} == launched, module.__name__
        assert all(one.small_shared in (None, capability in SMALL_SHARED) for one in chosen)


def test_kernels_take_turns_on_the_gpus_each_at_its_largest_there() -> None:
    one, other = object(), object()
    listed = [
        Compilation("large", one, {}, {"BLOCK": 64}, small_shared=False),
        Compilation("small", one, {}, {"BLOCK": 32}, small_shared=True),
        Compilation("any", other, {}),
        Compilation("new", other, {}, {"BLOCK": 32}, oldest=90),
    ]
    turns = [
        [(pair[0].name, pair[1]) for pair in in_turn(listed, iter(capabilities))]
        for capabilities in ((80, 86), (89, 90))
    ]
    assert turns == [[("large", 80), ("any", 86)], [("small", 89), ("new", 90)]]


def test_a_kernel_file_that_does_not_say_how_it_is_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="silent"):
        compilations_of(ModuleType("silent"))
    monkeypatch.setitem(compile_gate.VARIANTS, "empty", list)
    with pytest.raises(AssertionError, match="no compilation"):
        compilations_of(ModuleType("empty"))


def test_the_gate_takes_each_kernel_at_its_largest() -> None:
    one, other = object(), object()
    large = {"BLOCK": 32, "DIM": 64}
    made = [
        Compilation("small", one, {}, large | {"BLOCK": 16}),
        Compilation("big", one, {}, large),
        Compilation("deep", one, {}, large, num_stages=3),
        Compilation("flag", one, {}, large | {"ON": True}),
        Compilation("other", other, {}),
    ]
    assert [one.name for one in most_demanding(made)] == ["deep", "other"]


def test_what_a_gpu_or_the_lowest_triton_does_not_take_is_a_fault(tmp_path: Path) -> None:
    """The control: the same gate with SMs of one KiB, with a signature of another type, with a function that
    returns None (Triton 3.9 takes it, and 3.6 had no kernel of attention), and with the tiles of Mamba-2 that
    an H200 could not run."""
    (tmp_path / "returns_none.py").write_text("""
import triton
@triton.jit
def nothing():
    return None
@triton.jit
def kernel(out):
    if nothing() is None:
        triton.language.store(out, 1.0)
""")
    script = """
import dataclasses
from returns_none import kernel
from tests.support import compile_gate, lowest_triton
from tests.support.kernel_variants.compilation import Compilation
from tests.support.kernel_variants.recurrent import of_mamba2
from tests.support.kernel_variants.step import of_arena_kernels
made = compile_gate.most_demanding(of_arena_kernels())
compress = next(one for one in of_arena_kernels() if one.constants.get("COLUMNS") == 16)
assert compile_gate.compiled(compress, 80).fault is None
compile_gate.SHARED_MAX_BYTES[80] = 16
assert "shared memory" in compile_gate.compiled(compress, 80).fault
fill = made[0]
wrong = dataclasses.replace(fill, signature=fill.signature | {"items": "fp32"})
assert compile_gate.compiled(wrong, 90).fault
none = Compilation("none", kernel, {"out": "*fp32"})
for way in (compile_gate.compiled, compile_gate.in_front):
    assert "nothing" in way(none, 90).fault, way(none, 90)
right = next(one for one in of_mamba2() if one.name == "mamba2 outputs bf16 128 P 32" and 90 in one.only)
for width, warps in ((32, 4), (32, 8), (64, 4)):
    tried = dataclasses.replace(right, constants=right.constants | {"BP": width}, num_warps=warps)
    assert (compile_gate.compiled(tried, 90).fault is None) == (width == 64), (width, warps)
"""
    path = os.pathsep.join([str(lowest_triton.directory()), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(COMPILED), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], env=variables, check=True)


def test_kernel_files_are_found_by_their_names() -> None:
    names = {module.__name__ for module in kernel_modules()}
    assert {"weft.runner.arena_kernels", "weft.tensor.kernels.write_kv"} <= names
    assert compile_gate.__name__ not in names
