"""Step buffers that are reused from one step to the next.

On a CPU a big temporary costs page faults rather than arithmetic: a fresh 64 MB tensor is several times
slower to fill than an old one. Ops therefore take their big temporaries here by name:

    buffer = scratch.take("delta_rule.state", (runs, heads, k_dim, v_dim), torch.float32)

A buffer has unspecified contents. It belongs to the caller until the same name is taken again, and an op
never returns it. An op takes each name at most once per call, or per group of rows that it has finished. A
name's buffer grows to the largest step and is bounded by it (law L11).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch


class Scratch(threading.local):
    """Buffers per thread: two engines in one process may compute at the same time."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        """Device of the step: the default of ``take``."""
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return a contiguous tensor of ``shape`` with unspecified contents."""
        where = self.device if device is None else device
        # Torch's allocator reuses a GPU's memory without a fault. A shared buffer would even be wrong there: a
        # recorded step must own its outputs, and a buffer may grow under another step.
        if where.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device=where)
        key = (name, dtype, where)
        count = prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count:
            # Outside inference mode, so that other code may write the buffer too.
            with torch.inference_mode(False):
                buffer = torch.empty(count, dtype=dtype, device=where)
            self._buffers[key] = buffer
        return buffer[:count].view(tuple(shape))

    def drop(self) -> None:
        """Return this thread's buffers to the allocator."""
        self._buffers.clear()


scratch = Scratch()
