"""Bytes of the arena where no plan writes: pages and slots that a test spoils."""

from __future__ import annotations

from weft.runner.arena import DeviceArena, Items


def fill_pages(arena: DeviceArena, pages: Items, byte: int) -> None:
    arena.fill(pages, arena.plan.page_bytes, byte)


def fill_slots(arena: DeviceArena, slots: Items, byte: int) -> None:
    arena.fill(slots, arena.plan.slot_stride_bytes, byte)


def fill_frames(arena: DeviceArena, frames: Items, byte: int) -> None:
    arena.fill(frames, arena.plan.frame_bytes, byte)
