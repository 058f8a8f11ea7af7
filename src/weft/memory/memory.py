"""``Memory``, the interface of this folder: five verbs over one arena, and its numbers.

    match (reads only)               what the cache has of a prompt
    open  extend  save  close        on a transaction, which changes nothing (transaction.py)
      '- publish: a close after which the sequence continues; reclaim: the answer to a refusal
    commit                           the only writer (state.py)

    memory = Memory(plan_arena(spec, memory_bytes))
    transaction = memory.transaction()
    if transaction.open(seq, memory.match(tokens, salt=""), len(tokens)):
        ...                                  # plan with transaction.new_pages(seq) and slot_of(seq)
    memory.commit(transaction.seal())        # or drop the transaction: nothing has happened

A verb returns False or None if memory is short (law L3), and raises AssertionError for a bug. Frames are known only
inside this folder, except for the ids of frames to zero (law L6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weft.memory.audit import audit
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.cache import with_lost_to_salt
from weft.memory.prefix.followers import BlockFollower, SnapshotFollower
from weft.memory.prefix.pins import Pins
from weft.memory.prefix.policy import Policy, pages_alone
from weft.memory.prefix.readings import SnapshotContents, shape_of, snapshot_contents
from weft.memory.prefix.tree import PrefixTree
from weft.memory.reservation import Lease, Reservation
from weft.memory.state import MemoryState, apply
from weft.memory.transaction import Transaction
from weft.memory.usage import CacheShape, MemoryUsage, MoveCounts
from weft.memory.values import NOTHING_RECALLED, Match, NodeId, SnapshotOutlook
from weft.units import SeqId

NEW_SNAPSHOTS_MAX = 4096
"""Most computed snapshots that wait for a store to look at them; the oldest are forgotten (law L11)."""


class Memory:
    """The memory of one rank. ``plan`` is its geometry; not thread safe, as one engine owns it."""

    def __init__(
        self,
        plan: ArenaPlan,
        *,
        cache: bool = False,
        policy: Policy | None = None,
        count_salt: bool = False,
        pins_share: float = 0.0,
    ) -> None:
        """Make an empty memory. ``cache``: prefixes are cached. ``policy``: the order of eviction, None for least
        recently used. ``count_salt``: count tokens that only another salt has as lost (see ``salts``).
        ``pins_share``: share of the arena that pinned prefixes may hold (``prefix.pins``)."""
        self.plan = plan
        self.counts_salt = count_salt
        self._state = MemoryState(plan, cache=cache, policy=policy, pins_bytes=int(plan.arena_bytes * pins_share))
        self._pages_held_max = 0
        self._slots_held_max = 0
        self._moved = MoveCounts()

    @property
    def caches(self) -> bool:
        """Whether prefixes are cached for later sequences."""
        return self._state.cache.enabled

    @property
    def prefix_tree(self) -> PrefixTree:
        """The tree of cached prefixes. Read it between two steps; only a commit changes it."""
        return self._state.cache.tree

    @property
    def pins(self) -> Pins:
        """Return the prefixes with names. Change them between two steps only."""
        return self._state.cache.pins

    def match(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, salt: str) -> Match:
        """Return the longest cached prefix of ``tokens`` under ``salt``, without a change. At least the last token is
        left to compute. With the cache off the match is empty, and nothing is lost."""
        state = self._state
        token_ids = np.asarray(tokens, dtype=np.int32)
        match = state.cache.match(token_ids, salt, state.version)
        if self.caches:
            recall = state.cache.policy.recall(salt, token_ids[:-1].tobytes())
            match = match if recall is NOTHING_RECALLED else replace(match, recall=recall)
        return with_lost_to_salt(state.cache, token_ids, match) if self.counts_salt else match

    def hit_tokens(self, tokens: npt.NDArray[np.int32], *, salt: str) -> int:
        """Return ``match(tokens).cached_tokens``; the same until ``prefix_tree.change_count`` grows."""
        return self._state.cache.match(tokens, salt, self._state.version).cached_tokens

    def transaction(self) -> Transaction:
        """Return a transaction to fill; see ``Transaction`` for open, extend, save, close and seal."""
        return Transaction(self._state)

    def commit(self, reservation: Reservation) -> None:
        """Write ``reservation`` into memory's state. AssertionError if it was planned on another version."""
        state = self._state
        # New items and those of closed leases are held at once: the peak of a step is before it frees.
        pages_held = state.pages.packing.held_count + len(reservation.pages)
        slots_held = state.slots.packing.held_count + len(reservation.slots)
        apply(state, reservation)
        state.cache.policy.committed()
        self._count_moves(reservation)
        self._pages_held_max = max(self._pages_held_max, pages_held)
        self._slots_held_max = max(self._slots_held_max, slots_held)

    def _count_moves(self, reservation: Reservation) -> None:
        pages, slots, counts = len(reservation.moves.pages), len(reservation.moves.slots), self._moved
        counts.pages += pages
        counts.slots += slots
        counts.bytes += pages * self.plan.page_bytes + slots * self.plan.slot_stride_bytes
        counts.frames_converted += sum(claim.former_kind not in (None, claim.kind) for claim in reservation.frames)

    def flush(self) -> None:
        """Evict everything that no sequence reads. This is a commit of its own: between steps only."""
        transaction = self.transaction()
        transaction.flush()
        self.commit(transaction.seal())

    def lose(self) -> None:
        """Forget the bytes of the arena, which are lost. Evict the cache and mark every frame as never used, so that
        each one is zeroed before its next use (law L6). Counters and the memory of the policy stay. No lease may
        exist."""
        self.flush()
        state = self._state
        holdings = (len(state.leases), state.pages.packing.held_count, state.slots.packing.held_count)
        assert holdings == (0, 0, 0), f"leases, pages and slots are held while the arena goes: {holdings}"
        state.arena.forget()

    def take_new_snapshots(self) -> list[NodeId]:
        """Return the nodes whose snapshot was computed, and not loaded, since the last call. The first call has none:
        it begins the list."""
        cache = self._state.cache
        nodes = list(cache.new_snapshots or ())
        cache.new_snapshots = deque(maxlen=NEW_SNAPSHOTS_MAX)
        return nodes

    def snapshot_contents(self, node: NodeId, start: int = 0) -> SnapshotContents | None:
        """Return the snapshot of ``node`` with its pages from position ``start`` on; None if a store cannot have
        it (``weft.memory.prefix.readings``). Reads only."""
        return snapshot_contents(self._state.cache, node, start)

    def snapshot_outlook(self, node: NodeId) -> SnapshotOutlook | None:
        """Return the expected use of the snapshot at ``node``, None if it is gone. Changes nothing."""
        cache, plan = self._state.cache, self.plan
        known = cache.tree.by_id.get(node)
        if known is None:
            return None
        alone = plan.slot_stride_bytes + pages_alone(known) * plan.page_bytes
        return SnapshotOutlook(cache.policy.uses_of(known), known.end, alone)

    def follow_snapshots(self, *, pages: bool) -> SnapshotFollower:
        """Return a follower that reports the cache's changes from now on. ``pages``: of KV pages too. A model without
        states is always reported by pages."""
        return SnapshotFollower(self.prefix_tree, pages=pages or not self._state.cache.stateful)

    def follow_blocks(self, adapter_name: Callable[[str], str]) -> BlockFollower:
        """Return a follower that makes KV events of the cache's changes from now on. ``adapter_name``: of a digest."""
        return BlockFollower(self.prefix_tree, adapter_name)

    @property
    def version(self) -> int:
        """Number of commits so far."""
        return self._state.version

    @property
    def cached_tokens(self) -> int:
        """Tokens of the cached prefixes, each counted once. Visits every node."""
        return sum(node.end - node.start for node in self._state.cache.tree.nodes())

    def cache_shape(self, seconds_since: Callable[[int], float]) -> CacheShape:
        """Return the shape of the prefix tree: sizes, uses, and few tokens of few prefixes. ``seconds_since``: the
        age of a version. Visits each node once, up to a bound."""
        return shape_of(self._state.cache, seconds_since)

    def lease(self, seq: SeqId) -> Lease:
        """Return the lease of ``seq``. Raise AssertionError without one."""
        lease = self._state.leases.get(seq)
        assert lease is not None, f"sequence {seq} has no lease"
        return lease

    def usage(self) -> MemoryUsage:
        plan, state, tree = self.plan, self._state, self._state.cache.tree
        compressed_states, compressed_kv = state.cache.compressed_states, state.cache.compressed_kv
        pages_cached = state.cache.page_count
        pages, slots = state.pages.packing, state.slots.packing
        free = state.arena.free_count
        page_bytes = pages.held_count * plan.page_bytes
        slot_bytes = slots.held_count * plan.slot_stride_bytes
        return MemoryUsage(
            arena_bytes=plan.arena_bytes,
            page_bytes=page_bytes,
            slot_bytes=slot_bytes,
            open_bytes=plan.arena_bytes - page_bytes - slot_bytes - free * plan.frame_bytes,
            free_bytes=free * plan.frame_bytes,
            frame_count=plan.frame_count,
            frames_free=free,
            frames_of_pages=len(pages.stacks),
            frames_of_slots=len(slots.stacks),
            pages_held=pages.held_count,
            slots_held=slots.held_count,
            pages_available=pages.free_count + free * plan.pages_per_frame,
            slots_available=slots.free_count + free * plan.slots_per_frame,
            leases=len(state.leases),
            pages_held_max=self._pages_held_max,
            slots_held_max=self._slots_held_max,
            pages_cached=pages_cached,
            pages_shared=tree.held_page_count,
            slots_cached=tree.slot_count,
            states_compressed=len(compressed_states),
            compressed_bytes=compressed_states.page_count * plan.page_bytes,
            pages_compressed=compressed_kv.record_count,
            compressed_kv_bytes=compressed_kv.page_count * plan.page_bytes,
            compressed_kv_dtype=plan.compressed_kv_dtype if plan.compressed_kv_bytes else None,
            cached_bytes=pages_cached * plan.page_bytes + tree.slot_count * plan.slot_stride_bytes,
            evictable_bytes=state.cache.evictable_bytes,
            pinned_bytes=state.cache.pins.held_bytes,
            cache_nodes=len(tree.by_id),
            cache=replace(state.cache.counts),
            moves=replace(self._moved),
        )

    def audit(self) -> None:
        """Recount everything from the owners (law L1). AssertionError names the first difference."""
        audit(self._state)
