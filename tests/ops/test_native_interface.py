"""An extension of other sources than the Python beside it is not used, and said to be there."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.tensor import native

CSRC = Path(__file__).parents[2] / "csrc"
DIGEST = "707dda4adfb59a0a"
"""Of what Python hands over: see the test that compares it."""


@pytest.mark.parametrize(
    ("built", "age"),
    [
        (SimpleNamespace(INTERFACE=native.INTERFACE - 1), "older"),
        (SimpleNamespace(), "older"),
        (SimpleNamespace(INTERFACE=native.INTERFACE + 1), "newer"),
    ],
)
def test_kernels_of_another_interface_are_not_used_and_the_way_out_is_named(built: Any, age: str) -> None:
    found = native.load(lambda: built)
    assert found.extension is None
    assert found.stale
    assert found.missing is not None
    assert f"{age} sources" in found.missing
    assert native.REBUILD in found.missing


def test_kernels_of_this_interface_are_used_and_missing_ones_are_not_called_stale() -> None:
    right = SimpleNamespace(INTERFACE=native.INTERFACE)
    assert native.load(lambda: right) == native.NativeModule(right)

    def missing() -> Any:
        raise ImportError("no such thing")

    assert native.load(missing) == native.NativeModule(None, "no such thing")


STALE = """
import sys, types
sys.modules["weft._native"] = types.SimpleNamespace(INTERFACE=0)
import torch
from weft.tensor import native
from weft.tensor.ops.elementwise import silu_mul
print(native.describe(), silu_mul(torch.ones(1, 32)).shape)
try:
    native.choose("native")
except Exception as error:
    print(error)
"""


def test_weft_says_so_once_and_goes_on_in_torch() -> None:
    told = subprocess.run(
        [sys.executable, "-c", STALE],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert told.stderr.count("the C++ kernels are not used") == 1
    assert native.REBUILD in told.stderr
    ran, refused = told.stdout.splitlines()
    assert ran == "torch (the C++ kernels are of other sources) torch.Size([1, 16])"
    assert "debug.cpu_kernels is native" in refused
    assert native.REBUILD in refused


def test_choosing_them_by_name_is_an_error_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_extension", None)
    monkeypatch.setattr(native, "STALE", True)
    with pytest.raises(ConfigError, match="cannot be used"):
        native.choose("native")


def test_the_interface_has_another_number_whenever_it_is_another() -> None:
    """What the numbers of enums and the arguments of functions mean is in two files. When this fails: add one
    to INTERFACE in csrc/module.cpp and in tensor/native.py, and put here what it shows."""
    text = "".join((CSRC / name).read_text() for name in ("kernels.hpp", "module.cpp"))
    assert f'm.attr("INTERFACE") = {native.INTERFACE};' in text
    without_comments = re.sub(r"//[^\n]*|\s+", "", text)
    assert hashlib.sha256(without_comments.encode()).hexdigest()[:16] == DIGEST
