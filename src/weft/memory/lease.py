"""A lease: everything that one running sequence holds, and its receipt for giving it back.

    pages   [ p0 p1 p2 p3 | p4 p5 p6 ]      p of tokens [16 i, 16 i + 16)
              shared         its own         those of the first ``shared_tokens`` belong to the tree

``slot`` is PAD in a model without recurrent layers. ``taps`` are slots that the sequence fills on its way and
that the tree has not adopted yet. Only commits write a lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.memory.values import NO_NODE, Checkpoint, NodeId
from weft.units import PageId, SeqId, SlotId


@dataclass(slots=True)
class Lease:
    seq: SeqId
    pages: list[PageId]
    slot: SlotId
    epoch: int
    cached_tokens: int
    """Tokens with cached KV and state when the lease opened."""
    salt: str = ""
    shared_tokens: int = 0
    """Tokens at the front with pages of the prefix tree: read, never written (law L7)."""
    held: NodeId = NO_NODE
    """The node that ends after ``shared_tokens``; NO_NODE if that is 0."""
    taps: list[Checkpoint] = field(default_factory=list)
    inexact: bool = False
    """It reads or was computed from data that was compressed once, and so is everything it publishes."""
    loads: bool = False
    """Its contents come from a store, not from a sequence that runs."""

    def move_slot(self, src: SlotId, dst: SlotId, epoch: int) -> None:
        """Its state, or the state of one of its taps, moved to ``dst``."""
        if self.slot == src:
            self.slot, self.epoch = dst, epoch
            return
        [at] = [at for at, tap in enumerate(self.taps) if tap.slot == src]
        self.taps[at] = Checkpoint(self.taps[at].position, dst, epoch)
