"""The books: all records of memory, in one place.

    arena     free frames                    pages, slots   owners and free items by frame
    cache     the prefix tree and its orders leases         by sequence
    version   the number of commits

Only ``transaction.apply`` writes them. Drafts and the facade read them.
"""

from __future__ import annotations

from weft.memory.frames.arena import Arena
from weft.memory.frames.owners import Pages, Slots
from weft.memory.frames.plan import ArenaPlan
from weft.memory.frames.pressure import slots_ahead
from weft.memory.lease import Lease
from weft.memory.prefix.cache import PrefixCache
from weft.memory.prefix.policy import Policy
from weft.units import SeqId


class Books:
    """``cache`` False: no prefix is cached. ``policy``: the order of eviction, None for least recently
    used."""

    __slots__ = ("arena", "cache", "leases", "pages", "plan", "slots", "slots_ahead", "version")

    def __init__(self, plan: ArenaPlan, *, cache: bool = False, policy: Policy | None = None) -> None:
        self.plan = plan
        self.arena = Arena(plan.frame_count)
        self.pages = Pages(plan.pages_per_frame, plan.frame_count)
        self.slots = Slots(plan.slots_per_frame, plan.frame_count)
        self.slots_ahead = slots_ahead(plan.slot_count)
        """Slots to keep free ahead of need."""
        self.cache = PrefixCache(plan, enabled=cache, page_owners=self.pages.owners,
                                 slot_owners=self.slots.owners, policy=policy)
        self.leases: dict[SeqId, Lease] = {}
        self.version = 0
