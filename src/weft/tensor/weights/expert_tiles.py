"""The matrices of experts in tiles, each expert by itself.

    experts   (tiles of expert 0, tiles of expert 1, ...)     plain or in 12 bits, each as its values allow
    table     int64 [experts, 4]: address, upper bytes, odd weights, form       what the kernel reads

Experts are packed straight from a mapped file, one after the other, and no copy of all of them exists. The
kernel (csrc/moe_tiles.inl) finds an expert by its row of the table.

Rejected: one tensor of all experts. Odd weights differ in number, and one expert of unusual values would keep
all others out of 12 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.tensor.weights.tiled import TiledWeight
from weft.tensor.weights.twelve_bit import InTiles


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """``experts`` have one shape and dtype. ``table``: see above; it is right as long as ``experts`` live."""

    experts: tuple[InTiles, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, experts: Sequence[InTiles]) -> ExpertTiles:
        assert len({(one.rows, one.columns, one.dtype) for one in experts}) == 1
        table = []
        for one in experts:
            address, form, _, _, highs, _, _, _, odd = one.native()
            table.append((address, highs, odd, form))
        return cls(tuple(experts), torch.tensor(table, dtype=torch.int64))

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.experts), self.experts[0].rows, self.experts[0].columns

    @property
    def dtype(self) -> torch.dtype:
        return self.experts[0].dtype

    @property
    def has_twelve_bits(self) -> bool:
        return not all(isinstance(one, TiledWeight) for one in self.experts)

    def native(self) -> tuple[int, ...]:
        """The sizes of an expert as the extension takes a weight; its address is that of the first."""
        return self.experts[0].native()

    def dense(self) -> torch.Tensor:
        """[experts, rows, columns], a copy."""
        return torch.stack([one.dense() for one in self.experts])
