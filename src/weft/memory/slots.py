"""State slots: one owner each, and an epoch per claim.

A claim on a slot is the pair (slot, epoch). The epoch of a slot goes up whenever it is given back, so a
claim that outlived its owner differs from every later one and its use is caught (law L5): the bytes it
points at belong to somebody else. ``holders[slot]`` is 0 or 1 (law L1): a state is overwritten in place
and is therefore never shared.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.arena import FrameKind
from weft.memory.packing import Packing
from weft.units import FrameId, SlotId


class Slots:
    __slots__ = ("epochs", "holders", "packing")

    def __init__(self, slots_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[SlotId] = Packing(FrameKind.SLOTS, slots_per_frame)
        self.holders = [0] * (slots_per_frame * frame_count)
        self.epochs = [0] * (slots_per_frame * frame_count)

    def take(self, slots: Sequence[SlotId]) -> None:
        self.packing.pop(slots)
        for slot in slots:
            assert self.holders[slot] == 0, f"slot {slot} is held and was drafted as free"
            self.holders[slot] = 1

    def drop(self, slot: SlotId, epoch: int) -> list[FrameId]:
        """Give a claim back. Returns the frame if it is empty now."""
        self.check(slot, epoch)
        self.holders[slot] = 0
        self.epochs[slot] += 1
        return self.packing.push([slot])

    def check(self, slot: SlotId, epoch: int) -> None:
        """The claim (slot, epoch) is alive; anything else is a bug (law L5)."""
        assert self.holders[slot] == 1, f"stale claim on slot {slot}: it is free"
        assert self.epochs[slot] == epoch, (
            f"stale claim on slot {slot}: of epoch {epoch}, and the slot is at {self.epochs[slot]}")
