"""The device work of the memory, as cases: zeroing (law L6), copies, moves.

The cases use an arena with a few of the model's frames. Zeroing writes a frame once; a copy reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from weft.bench.case import Bench, Case
from weft.families.architecture import Architecture
from weft.memory.frames.plan import plan_arena
from weft.runner.arena import DeviceArena

ARENA_BYTES = 512 << 20
ITEMS_MAX = 16
"""Frames, states or pages of one call, if the arena has twice as many."""


def memory_cases(architecture: Architecture, bench: Bench) -> Iterator[Case]:
    """The cases of an arena of ARENA_BYTES, all of them touched."""
    plan = plan_arena(architecture.spec(), ARENA_BYTES)
    arena = DeviceArena(plan, bench.device)
    arena.fill_frames(range(plan.frame_count), 0)
    for count in dict.fromkeys((1, min(ITEMS_MAX, plan.frame_count))):
        yield Case(f"zero {count} x {plan.frame_bytes >> 10} KiB",
                   partial(arena.fill_frames, range(count), 0), count * plan.frame_bytes)
    for what, copy, items, size in (("state", arena.copy_slots, plan.slot_count, plan.slot_stride_bytes),
                                    ("page", arena.copy_pages, plan.page_count, plan.page_bytes)):
        count = min(ITEMS_MAX, items // 2)
        if count:
            first = np.arange(count, dtype=np.int32)
            yield Case(f"copy {count} x {what} of {size >> 10} KiB", partial(copy, first, first + count),
                       2 * count * size)
