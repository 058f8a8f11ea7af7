"""Every Triton kernel compiles for the GPUs it is made for, with the shared memory that they have.

In a process of its own: this one interprets kernels, which is decided where they are defined.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import compile_gate
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


def test_every_kernel_compiles_for_a_gpu_that_it_is_made_for() -> None:
    """Each at its largest, for one of them in turn; ``make compile-gpu`` is the whole table, in minutes."""
    if COMPILED.exists() and len(list(COMPILED.iterdir())) > KERNELS_KEPT:
        shutil.rmtree(COMPILED)
    variables = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(COMPILED)}
    ran = subprocess.run([sys.executable, "-m", "tests.support.compile_gate"], env=variables, check=False,
                         capture_output=True, text=True)
    faults = [line for line in ran.stdout.splitlines() if " sm_" in line and not line.endswith(" ok")]
    assert not faults, "\n".join(faults)
    assert ran.returncode == 0, ran.stderr
    counts = [ran.stdout.count(f" sm_{capability} ") for capability in SHARED_MAX_BYTES]
    assert sum(counts) >= len(kernel_modules())
    assert max(counts) - min(counts) <= 2   # a kernel of newer GPUs alone leaves an older one's turn out


def test_a_sum_that_adds_its_low_word_to_its_high_word_is_seen() -> None:
    """Lines of Mamba-2's outputs by Triton 3.6. The control: a register that was set to another value."""
    low = "        /*5d70*/                   UIADD3 UR4, UP0, UR7, 0x40, URZ ;     /* 0x00000 */"
    high = "        /*5d80*/             UIADD3.X UR5, UR7, -0x7fffffe0, URZ, UP0, !UPT ;   /* 0x8 */"
    between = "        /*5d78*/             UMOV UR7, URZ ;        /* 0x0000003f00057c82 */"
    other = high.replace("UR7", "URZ")
    assert len(compile_gate.wrong_descriptors("\n".join([low, high]))) == 1
    assert compile_gate.wrong_descriptors("\n".join([low, between, high])) == []
    assert compile_gate.wrong_descriptors("\n".join([low, other])) == []


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
    listed = [Compilation("large", one, {}, {"BLOCK": 64}, small_shared=False),
              Compilation("small", one, {}, {"BLOCK": 32}, small_shared=True),
              Compilation("any", other, {}), Compilation("new", other, {}, {"BLOCK": 32}, oldest=90)]
    turns = [[(pair[0].name, pair[1]) for pair in in_turn(listed, iter(capabilities))]
             for capabilities in ((80, 86), (89, 90))]
    assert turns == [[("large", 80), ("any", 86)], [("small", 89), ("new", 90)]]


def test_a_kernel_file_that_does_not_say_how_it_is_compiled_is_refused(
        monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="silent"):
        compilations_of(ModuleType("silent"))
    monkeypatch.setitem(compile_gate.VARIANTS, "empty", list)
    with pytest.raises(AssertionError, match="no compilation"):
        compilations_of(ModuleType("empty"))


def test_the_gate_takes_each_kernel_at_its_largest() -> None:
    one, other = object(), object()
    large = {"BLOCK": 32, "DIM": 64}
    made = [Compilation("small", one, {}, large | {"BLOCK": 16}), Compilation("big", one, {}, large),
            Compilation("deep", one, {}, large, num_stages=3),
            Compilation("flag", one, {}, large | {"ON": True}), Compilation("other", other, {})]
    assert [one.name for one in most_demanding(made)] == ["deep", "other"]


def test_a_kernel_that_takes_too_much_is_a_fault(tmp_path: Path) -> None:
    """The control: the same gate with SMs of one KiB, and with a signature of another type."""
    script = """
import dataclasses
from tests.support import compile_gate
from tests.support.kernel_variants.step import of_arena_kernels
made = compile_gate.most_demanding(of_arena_kernels())
compress = next(one for one in of_arena_kernels() if one.constants.get("COLUMNS") == 16)
assert compile_gate.compiled(compress, 80).fault is None
compile_gate.SHARED_MAX_BYTES[80] = 16
assert "shared memory" in compile_gate.compiled(compress, 80).fault
fill = made[0]
wrong = dataclasses.replace(fill, signature=fill.signature | {"items": "fp32"})
assert compile_gate.compiled(wrong, 90).fault
"""
    variables = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=variables, check=True)


def test_kernel_files_are_found_by_their_names() -> None:
    names = {module.__name__ for module in kernel_modules()}
    assert {"weft.runner.arena_kernels", "weft.tensor.kernels.write_kv"} <= names
    assert compile_gate.__name__ not in names
