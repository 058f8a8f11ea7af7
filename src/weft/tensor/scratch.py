"""Step buffers that are reused from one step to the next.

On a CPU a big temporary costs page faults rather than arithmetic: the allocator has just mapped its memory. A
fresh 64 MB tensor is several times slower to fill than an old one. Ops therefore take their big temporaries
here by name, and get the same memory each time:

    buffer = scratch.take("gated_delta.state", (runs, heads, k_dim, v_dim), torch.float32)

A buffer has unspecified contents. It belongs to the caller until the same name is taken again, and an op
never returns it. One name has one owner: an op takes each name at most once per call, or per group of rows
that it has finished. So two live uses of one name cannot meet. Buffers are per thread, because two engines in
one process may compute at the same time. A name's buffer grows to the largest step and is bounded by it (law
L11); ``bytes_held`` reports the total.

A GPU needs no such buffers: torch's allocator reuses memory without a fault. A reused buffer would even be
wrong there. A step that is recorded as a graph must own what it writes, and a buffer may grow under another
step. So on a GPU every ``take`` is a new tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch


class Scratch(threading.local):
    def __init__(self) -> None:
        self.home = torch.device("cpu")
        """The device of the step: the default of ``take``."""
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype,
             device: torch.device | None = None) -> torch.Tensor:
        """A contiguous tensor of ``shape`` with unspecified contents."""
        where = self.home if device is None else device
        if where.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device=where)
        key = (name, dtype, where)
        count = prod(shape)
        held = self._buffers.get(key)
        if held is None or held.numel() < count:
            # Outside inference mode, so that other code may write the buffer too.
            with torch.inference_mode(False):
                held = torch.empty(count, dtype=dtype, device=where)
            self._buffers[key] = held
        return held[:count].view(tuple(shape))

    def bytes_held(self) -> int:
        """Bytes of this thread's buffers."""
        return sum(held.numel() * held.itemsize for held in self._buffers.values())

    def drop(self) -> None:
        """Return this thread's buffers to the allocator."""
        self._buffers.clear()


scratch = Scratch()
