"""The memory of the card: torch's caching allocator over a budget.

    segment   2 MiB for blocks up to 1 MiB; 20 MiB up to 10 MiB; above, whole multiples of 2 MiB
    block     512 bytes or a multiple, the best fit among the free ones of its pool, stream and kind
    freed     poison, in the order of its stream; the next block of that size has the same address

A pool is torch's own (None), or the private one of graphs. The numbers are those of
``c10/cuda/CUDACachingAllocator.cpp``. New memory is poison too.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

import torch

UNIT = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
MIDDLE, MIDDLE_SEGMENT = 10 << 20, 20 << 20
GRAIN = 2 << 20
POISON = 0x7FFF
"""Of 16 bits: NaN as float16, bfloat16 and float32; as an integer an index far outside of everything."""


def poison(memory_B: torch.Tensor) -> None:
    """uint8, an even number of bytes at an even address; an odd last byte stays."""
    memory_B[: memory_B.numel() // 2 * 2].view(torch.int16).fill_(POISON)


@dataclass(eq=False)
class Segment:
    memory: torch.Tensor
    pool: Pool | None
    alive: bool = True


@dataclass(eq=False)
class Block:
    segment: Segment
    offset: int
    size: int
    key: tuple[Any, ...]
    """Pool, stream, and whether it is small."""
    free: bool = False
    before: Block | None = None
    behind: Block | None = None

    @property
    def memory(self) -> torch.Tensor:
        return self.segment.memory[self.offset : self.offset + self.size]

    @property
    def address(self) -> int:
        return self.segment.memory.data_ptr() + self.offset


@dataclass(eq=False)
class Pool:
    """Of graphs. ``recording``: a capture allocates from it; ``users``: graphs that hold it."""

    recording: bool = False
    users: int = 0
    stream: Any = None
    """Of its first recording."""


@dataclass
class Allocator:
    """``total``: bytes of the card; ``context``: those that the driver and torch take at once."""

    total: int
    context: int = 0
    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    segments: dict[int, Segment] = field(default_factory=dict)
    """By the address of their storage."""
    taken: set[Block] = field(default_factory=set)
    _free: dict[tuple[Any, ...], list[Block]] = field(default_factory=lambda: collections.defaultdict(list))

    @property
    def free_bytes(self) -> int:
        return self.total - self.context - self.reserved

    def take(self, size: int, stream: Any, pool: Pool | None) -> Block:
        """Raises torch.OutOfMemoryError."""
        size = max(1, -(-size // UNIT)) * UNIT
        small = size <= SMALL
        key = (pool, stream, small)
        fitting = [block for block in self._free[key] if block.size >= size]
        block = min(fitting, key=lambda one: (one.size, one.address)) if fitting else self._segment(size, key)
        if block in self._free[key]:
            self._free[key].remove(block)
        rest = block.size - size
        if rest >= UNIT if small else rest > SMALL:
            behind = Block(block.segment, block.offset + size, rest, key, True, block, block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.behind, block.size = behind, size
            self._free[key].append(behind)
        block.free = False
        self.taken.add(block)
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def give(self, block: Block) -> None:
        """Its bytes may be given out again at once."""
        self.allocated -= block.size
        block.free = True
        self.taken.discard(block)
        free = self._free[block.key]
        behind = block.behind
        if behind is not None and behind.free:
            free.remove(behind)
            block.size, block.behind = block.size + behind.size, behind.behind
            if block.behind is not None:
                block.behind.before = block
        before = block.before
        if before is not None and before.free:
            before.size, before.behind = before.size + block.size, block.behind
            if block.behind is not None:
                block.behind.before = before
        else:
            free.append(block)

    def empty_cache(self) -> None:
        """Segments without a block go back to the driver, unless a graph has their pool."""
        for (pool, *_), blocks in self._free.items():
            if pool is not None and pool.users:
                continue
            for block in [one for one in blocks if one.before is None and one.behind is None]:
                blocks.remove(block)
                block.segment.alive = False
                self.reserved -= block.size
                del self.segments[block.segment.memory.untyped_storage().data_ptr()]

    def _segment(self, size: int, key: tuple[Any, ...]) -> Block:
        wanted = SMALL_SEGMENT if size <= SMALL else (MIDDLE_SEGMENT if size < MIDDLE else -(-size // GRAIN) * GRAIN)
        if wanted > self.free_bytes:
            self.empty_cache()
        if wanted > self.free_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {wanted / 2**20:.2f} MiB. GPU 0 has a total capacity "
                f"of {self.total / 2**20:.2f} MiB of which {self.free_bytes / 2**20:.2f} MiB is free."
            )
        with torch.inference_mode(False):
            memory = torch.empty(wanted, dtype=torch.uint8)
        poison(memory)
        self.reserved += wanted
        segment = Segment(memory, key[0])
        self.segments[memory.untyped_storage().data_ptr()] = segment
        return Block(segment, 0, wanted, key, True)
