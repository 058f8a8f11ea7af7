"""The recount: law L1 checked from the owners, trusting no counter.

    leases --own--> pages, slots --lie in--> frames --are--> claimed by one packing, or free in one stack

Owners are walked first: how often each page and slot is named by a lease. Then every record that was
kept along the way is compared with that: holder counts, free stacks, buckets, totals, free frames. Any
two that disagree are a leak, a double owner or a wrong count, and the message says which and where.

It reads everything once: linear in the arena, for property tests after each operation and for production
when the engine idles. It writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from weft.memory.arena import Arena
from weft.memory.packing import Item, Packing
from weft.memory.transaction import Books
from weft.units import PAD, FrameId, PageId, SlotId


def audit(books: Books) -> None:
    """Raises AssertionError where the books do not add up."""
    page_owners: Counter[PageId] = Counter()
    slot_owners: Counter[SlotId] = Counter()
    for seq, lease in books.leases.items():
        assert lease.seq == seq, f"the lease of sequence {seq} says {lease.seq}"
        page_owners.update(lease.pages)
        if books.plan.slots_per_frame:
            books.slots.check(lease.slot, lease.epoch)
            slot_owners[lease.slot] += 1
        else:
            assert lease.slot == PAD, f"sequence {seq} holds slot {lease.slot} of a model without states"
        assert len(set(lease.pages)) == len(lease.pages), f"sequence {seq} holds a page twice"
    _audit_holders("page", books.pages.holders, page_owners)
    _audit_holders("slot", books.slots.holders, slot_owners)
    assert all(count == 1 for count in slot_owners.values()), "a slot has two owners"
    _audit_packing("page", books.pages.packing, page_owners)
    _audit_packing("slot", books.slots.packing, slot_owners)
    _audit_frames(books.arena, books.pages.packing, books.slots.packing)


def _audit_holders(what: str, holders: Sequence[int], owners: Mapping[Item, int]) -> None:
    for item in owners:
        assert 0 <= item < len(holders), f"{what} {item} is owned and does not exist"
    counts: Mapping[int, int] = owners  # type: ignore[assignment]
    for index, count in enumerate(holders):
        named = counts.get(index, 0)
        assert count == named, f"{what} {index} counts {count} holders, its owners are {named}"


def _audit_packing(what: str, packing: Packing[Item], owners: Mapping[Item, int]) -> None:
    held_in: Counter[int] = Counter(item // packing.per_frame for item in owners)
    assert set(held_in) <= set(packing.stacks), f"a held {what} is in a frame that is not of {what}s"
    buckets = {frame: used for used, bucket in enumerate(packing.by_used) for frame in bucket}
    assert sum(len(bucket) for bucket in packing.by_used) == len(buckets), f"a {what} frame is in two buckets"
    assert set(buckets) <= set(packing.stacks), f"a bucket names a frame that is not of {what}s"
    free_count = 0
    for frame, stack in packing.stacks.items():
        used = held_in[frame]
        assert used, f"{what} frame {frame} is empty and was not given back"
        free = set(stack)
        assert len(free) == len(stack), f"{what} frame {frame} has a {what} free twice"
        assert free.isdisjoint(owners), f"{what} frame {frame} has a {what} both free and held"
        assert all(item // packing.per_frame == frame for item in free), (
            f"{what} frame {frame} has a free {what} of another frame")
        assert used + len(free) == packing.per_frame, (
            f"{what} frame {frame}: {used} held and {len(free)} free are not {packing.per_frame}: leaked")
        bucket = buckets.get(frame, packing.per_frame)
        assert bucket == used, f"{what} frame {frame} has {used} held and is in bucket {bucket}"
        free_count += len(free)
    occupied = sum(1 << used for used, bucket in enumerate(packing.by_used) if bucket)
    assert packing.occupied == occupied, (
        f"{what} buckets {occupied:b} are occupied, recorded as {packing.occupied:b}")
    assert packing.held_count == len(owners), f"{len(owners)} {what}s are held, counted {packing.held_count}"
    assert packing.free_count == free_count, f"{free_count} {what}s are free, counted {packing.free_count}"


def _audit_frames(arena: Arena, pages: Packing[PageId], slots: Packing[SlotId]) -> None:
    places: list[FrameId] = [frame for stack in arena.free.values() for frame in stack]
    places += list(pages.stacks)
    places += list(slots.stacks)
    seen = Counter(places)
    twice = [frame for frame, count in seen.items() if count > 1]
    assert not twice, f"frame {twice[0]} is in two places"
    lost = set(range(arena.frame_count)) - set(seen)
    assert not lost, f"frame {min(lost)} is free nowhere and claimed by none"
    assert len(seen) == arena.frame_count, "a frame beyond the arena"
