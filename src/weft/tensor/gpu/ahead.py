"""Compilation of a start's kernels, in parallel, before the first one runs.

    with compiled_ahead(threads, tell):      launches are bound and compiled, and compute nothing
        every step that the start measures   new memory is zeros, so indices stay inside

Triton compiles a kernel at its first launch. One after the other that was most of the 32 seconds in which a
4B model started on an H200. Its own asynchronous mode gives each compilation to a thread. Some 85 % of the
work is outside of Python's lock: the passes of MLIR and LLVM, and ``ptxas``, a process. The rest, walking the
kernel's source, stays one after the other.

Triton caches compiled kernels in TRITON_CACHE_DIR (``~/.triton/cache``), where the next start finds them. A kernel that
cannot be compiled raises its error at its first real launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

from weft.tensor.gpu import launch

_ZEROS = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, torch.Tensor.new_empty: torch.Tensor.new_zeros}
TELL_S = 1.0
"""Seconds between two lines of progress."""


class _NewMemoryIsZeros(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ZEROS.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def compiled_ahead(threads: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Compile the kernels that are launched inside the context. Its exit waits until all are compiled."""
    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True) as mode:
        launch.compiles_only = True
        try:
            with _NewMemoryIsZeros():
                yield
        finally:
            launch.compiles_only = False
        count, said_s = len(mode.raw_futures), began
        for done, _ in enumerate(as_completed(mode.raw_futures), 1):
            if time.monotonic() - said_s > TELL_S:
                said_s = time.monotonic()
                tell(f"kernels: {done} of {count} compiled")
    if count:
        tell(f"kernels: {count} compiled or read in {time.monotonic() - began:.1f} s, {threads} at once")
