"""A pytest plugin: ``weft._native`` is the file that WEFT_NATIVE_UNDER_TEST names (``tests/sanitize.sh``).

Sanitizers look at what a kernel reads, writes and computes, not at its numbers: the suite compares those, by
the same tests. A naive twin walks tokens in torch, and took half of the time here. So a kernel stands in for
its twin, and each kernel meets the inputs that it would meet anyway. What a kernel does not take, its twin
computes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import weft

spec = importlib.util.spec_from_file_location("weft._native", os.environ["WEFT_NATIVE_UNDER_TEST"])
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["weft._native"] = module
spec.loader.exec_module(module)
weft._native = module  # type: ignore[attr-defined]

import torch  # noqa: E402

from tests.support import naive_ops, native_ops  # noqa: E402 - they import weft._native
from weft.tensor.op import UNFIT  # noqa: E402

# No AMX is compiled in here. On a CPU that has it bfloat16 would be left to torch, and no kernel would run.
torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]


def stand_in(name: str) -> None:
    twin, kernel = getattr(naive_ops, name), native_ops.form_of(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        return twin(*args, **kwargs) if out is UNFIT else out

    setattr(naive_ops, name, run)


for name in (
    "causal_conv",
    "delta_rule",
    "mamba1",
    "mamba2",
    "moe",
    "paged_attention",
    "rms_norm",
    "rotary",
    "wkv7",
    "write_kv",
):
    stand_in(name)
