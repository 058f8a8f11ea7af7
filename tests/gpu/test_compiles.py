"""Every Triton kernel compiles for the GPUs it is made for, with the shared memory that they have.

In a process of its own: this one interprets kernels, which is decided where they are defined.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from weft.tensor.gpu import compile_gate
from weft.tensor.gpu.compilation import Compilation
from weft.tensor.gpu.compile_gate import compilations_of, kernel_modules, most_demanding


def test_every_kernel_compiles_for_a_gpu_that_it_is_made_for(tmp_path: Path) -> None:
    """Each at its largest, for one of them in turn; ``make compile-gpu`` is the whole table, in minutes."""
    variables = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-m", "weft.tensor.gpu.compile_gate"], env=variables, check=False,
                         capture_output=True, text=True)
    faults = [line for line in ran.stdout.splitlines() if " sm_" in line and not line.endswith(" ok")]
    assert not faults, "\n".join(faults)
    assert ran.returncode == 0, ran.stderr
    counts = [ran.stdout.count(f" sm_{capability} ") for capability in (80, 90)]
    assert sum(counts) >= len(kernel_modules())
    assert abs(counts[0] - counts[1]) <= 1


def test_a_kernel_file_that_does_not_say_how_it_is_compiled_is_refused() -> None:
    with pytest.raises(AttributeError, match="compilations"):
        compilations_of(ModuleType("silent"))
    empty = ModuleType("empty")
    empty.compilations = list  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="no compilation"):
        compilations_of(empty)


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
from weft.runner import arena_kernels
from weft.tensor.gpu import compile_gate
made = compile_gate.most_demanding(arena_kernels.compilations())
compress = next(one for one in arena_kernels.compilations() if one.constants.get("COLUMNS") == 16)
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
    assert {"weft.runner.arena_kernels", "weft.tensor.ops.write_kv.triton"} <= names
    assert compile_gate.__name__ not in names
