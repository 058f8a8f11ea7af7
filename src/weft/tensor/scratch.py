"""Step buffers that are kept from one step to the next.

On a CPU the cost of a big temporary is not the arithmetic on it but the page faults of memory that the
allocator has just mapped: a fresh 64 MB tensor is several times slower to fill than an old one. Ops
therefore take their big temporaries here by name, and get the same memory each time:

    buffer = scratch.take("gated_delta.state", (runs, heads, k_dim, v_dim), torch.float32)

What is taken has unspecified contents, belongs to the caller until the same name is taken again, and is
never returned out of an op. One name has one owner: an op takes each of its names at most once per call
(or per group it is done with), so two live uses of one name cannot meet. Buffers are per thread, because
two engines in one process may compute at the same time. A name's buffer grows to the largest step seen
and is bounded by it (law L11); ``bytes_held`` says how much that is.

On a GPU none of this is needed, and a kept buffer would be wrong: torch's allocator hands out what it has
without a fault, and a step that is recorded as a graph must own what it writes, which a buffer that grows
under another step does not allow. So there every ``take`` is a new tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch


class Scratch(threading.local):
    def __init__(self) -> None:
        self.home = torch.device("cpu")
        """Where the step is computed: what ``take`` means when no device is named."""
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
            # Outside inference mode, so that the buffer may also be written by code that is not in it.
            with torch.inference_mode(False):
                held = torch.empty(count, dtype=dtype, device=where)
            self._buffers[key] = held
        return held[:count].view(tuple(shape))

    def bytes_held(self) -> int:
        """Bytes kept by this thread."""
        return sum(held.numel() * held.itemsize for held in self._buffers.values())

    def drop(self) -> None:
        """Give this thread's buffers back to the allocator."""
        self._buffers.clear()


scratch = Scratch()
