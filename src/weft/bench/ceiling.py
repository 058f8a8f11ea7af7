"""The best that the machine can do, measured in the same run: the yardstick of ``kernels``.

    copy bandwidth   a copy of a tensor far larger than any cache: bytes read and written per second
    matrix rate      a square product in the dtype of the weights: two per multiply-and-add, per second

The best of some tries, because a ceiling is the best that can be reached, not the usual. Rejected: the
numbers of a data sheet. No program reaches them, and this machine may share its memory with others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
_TRIES = 7


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes and floating-point operations per second."""

    copy_bytes_per_s: float
    matrix_flops_per_s: float

    def least_s(self, bytes_moved: int, flops: int) -> float:
        """The least time of this transfer and this arithmetic, each at its ceiling and both at once."""
        return max(bytes_moved / self.copy_bytes_per_s, flops / self.matrix_flops_per_s)


def measure_ceiling(device: torch.device, dtype: torch.dtype) -> Ceiling:
    """Takes a second or two."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = min(seconds_of(lambda: target.copy_(source), 1, device) for _ in range(_TRIES))
    side = MATRIX_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    matrix_s = min(seconds_of(lambda: left @ right, 1, device) for _ in range(_TRIES))
    return Ceiling(2 * COPY_BYTES[device.type] / copy_s, 2 * side**3 / matrix_s)


def seconds_of(call: Callable[[], object], times: int, device: torch.device | None = None) -> float:
    """Mean seconds of ``times`` consecutive calls; on a GPU by the device's clock, launches included."""
    if device is not None and device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                        for _ in range(2))
        began.record()
        for _ in range(times):
            call()
        ended.record()
        torch.cuda.synchronize(device)
        return float(began.elapsed_time(ended)) / 1e3 / times
    began_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began_s) / times
