"""State slots: one owner each, and an epoch per claim.

A claim on a slot is the pair (slot, epoch). The epoch goes up whenever the slot is given back. So a claim
that outlived its owner differs from every later one, and its use is caught (law L5): its bytes belong to
another sequence. ``owners[slot]`` is the owner (law L1; owners.py). A state is overwritten in place and
therefore never shared.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.frames.owners import FREE
from weft.memory.frames.packing import Packing
from weft.memory.values import FrameKind
from weft.units import FrameId, SlotId


class Slots:
    __slots__ = ("epochs", "owners", "packing")

    def __init__(self, slots_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[SlotId] = Packing(FrameKind.SLOTS, slots_per_frame)
        self.owners = [FREE] * (slots_per_frame * frame_count)
        self.epochs = [0] * (slots_per_frame * frame_count)

    def take(self, slots: Sequence[SlotId]) -> None:
        """Free slots leave the pool; ``give`` sets their owner."""
        self.packing.pop(slots)
        for slot in slots:
            assert self.owners[slot] == FREE, f"slot {slot} is held and was drafted as free"

    def give(self, slot: SlotId, owner: int) -> None:
        self.owners[slot] = owner

    def drop(self, slot: SlotId, epoch: int) -> list[FrameId]:
        """Give a claim back. Returns the frame if it is empty now."""
        self.check(slot, epoch)
        self.owners[slot] = FREE
        self.epochs[slot] += 1
        return self.packing.push([slot])

    def check(self, slot: SlotId, epoch: int) -> None:
        """Asserts that the claim (slot, epoch) is alive (law L5)."""
        assert self.owners[slot] != FREE, f"stale claim on slot {slot}: it is free"
        assert self.epochs[slot] == epoch, (
            f"stale claim on slot {slot}: of epoch {epoch}, and the slot is at {self.epochs[slot]}")
