"""One kernel at one size: its call, and the least that it must move and compute.

    Bench(device, dtype)  creates tensors and runs on the kernels' device
    Case                  name, call, bytes, flops, and other kernels for the same result (``rivals``)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weft.tensor.inputs import Runs
from weft.units import pages_for

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """``call`` runs the op once. ``bytes_moved`` and ``flops``: the least that the op's definition reads,
    writes and computes. ``rivals``: other libraries' kernels on the same numbers."""

    name: str
    call: Call
    bytes_moved: int = 0
    flops: int = 0
    rivals: dict[str, Call] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """``decode_rows``: sequences with one token each; ``prefill_tokens`` of one sequence; ``context``: tokens
    of a decode's sequence, its own included."""

    device: torch.device
    dtype: torch.dtype
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    context: int

    def noise(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers of spread 0.5."""
        return (torch.randn(*shape, device=self.device) * 0.5).to(dtype or self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)."""
        return torch.rand(*shape, device=self.device)

    def sizes(self) -> list[tuple[str, int, int, int]]:
        """(name, rows, tokens of each, tokens before them), decodes first."""
        return [*((f"decode {rows} x 1 at {self.context}", rows, 1, self.context - 1)
                  for rows in self.decode_rows),
                *((f"prefill 1 x {tokens}", 1, tokens, 0) for tokens in self.prefill_tokens)]

    def runs(self, rows: int, tokens: int, before: int) -> Runs:
        """``rows`` sequences with ``tokens`` new tokens each after ``before``, in pages of random order."""
        width = pages_for(before + tokens)
        pages = torch.randperm(rows * width).to(torch.int32).view(rows, width)
        return Runs(offsets=[row * tokens for row in range(rows)], starts=[before] * rows,
                    lengths=[tokens] * rows, slots=list(range(rows)), fresh=[False] * rows,
                    decode_count=rows if tokens == 1 else 0,
                    starts_R=torch.tensor([before] * rows, device=self.device),
                    slots_R=torch.arange(rows, device=self.device),
                    context_R=torch.tensor([before + tokens] * rows, device=self.device),
                    page_table_RP=pages.to(self.device))


def size_of(*tensors: torch.Tensor) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
