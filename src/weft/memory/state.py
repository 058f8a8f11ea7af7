"""All records of memory, and their one writer: a transaction changes nothing, a reservation is complete, a
commit writes it.

    arena     free frames                    pages, slots   owners and free items by frame
    cache     the prefix tree and its orders leases         by sequence
    version   the number of commits

    memory --Transaction--> open / extend / close ... --seal--> Reservation --apply--> memory, one version on
                              |
                              +-- dropped: nothing to undo, nothing was done

``apply`` takes the items that the reservation names, asserts that each item was free and next, and is the only code
that writes memory's state. The walk that hands memory out also says whether it fits, so there is no predictor that
could disagree (law L2).

Order: take before giving back. Moves come first, before any item changes its owner, and the tree grows before
it is cut. So everything that a transaction closes, leaves or evicts is free from the next transaction on. It
is never handed out under a sequence that the step in flight may still read.

Laws: L2 (each verb takes all it needs or nothing), L3 (no room is False or None), L5 (an outdated reservation
is caught here), L6 (``zero_frames``: claimed frames with bytes of another kind).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.frames.arena import (
    Arena,
    Pages,
    Slots,
    kv_node_of,
    lease_of,
    of_compressed_kv,
    of_compressed_state,
    of_lease,
    of_tree,
    state_node_of,
)
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.cache import Freed, PrefixCache
from weft.memory.prefix.eviction import slots_ahead
from weft.memory.prefix.policy import Policy
from weft.memory.reservation import Lease, Moves, Opening, Reservation
from weft.memory.values import NO_NODE, NO_SLOT, FrameKind, NodeId
from weft.units import PAGE_TOKENS, FrameId, SeqId


class MemoryState:
    """The records of memory. ``cache`` False: no prefix is cached. ``policy``: the order of eviction, None for least
    recently used."""

    __slots__ = ("arena", "cache", "leases", "pages", "plan", "slots", "slots_ahead", "version")

    def __init__(
        self, plan: ArenaPlan, *, cache: bool = False, policy: Policy | None = None, pins_bytes: int = 0
    ) -> None:
        self.plan = plan
        self.arena = Arena(plan.frame_count)
        self.pages = Pages(plan.pages_per_frame, plan.frame_count)
        self.slots = Slots(plan.slots_per_frame, plan.frame_count)
        self.slots_ahead = slots_ahead(plan.slot_count)
        """Slots to keep free ahead of need."""
        self.cache = PrefixCache(
            plan,
            enabled=cache,
            page_owners=self.pages.owners,
            slot_owners=self.slots.owners,
            policy=policy,
            pins_bytes=pins_bytes,
        )
        self.leases: dict[SeqId, Lease] = {}
        self.version = 0


def apply(memory: MemoryState, reservation: Reservation) -> None:
    """Write ``reservation`` into ``memory``: claim frames, take, hand out, grow the tree, give back. Assert that it was
    planned on this version of memory's state, and that everything it takes is free and next."""
    assert reservation.version == memory.version, (
        f"a reservation of version {reservation.version} was committed to version {memory.version}"
    )
    memory.cache.tree.version = reservation.version + 1
    work = reservation.arena_work
    for claim in reservation.frames:
        memory.arena.claim(claim)
        packing = memory.pages.packing if claim.kind is FrameKind.PAGES else memory.slots.packing
        packing.add(claim.frame)
    memory.pages.take(reservation.pages)
    memory.slots.take(reservation.slots)
    if reservation.moves:
        _move(memory, reservation.moves)
    for restore in work.kv_restores:
        if restore.node == NO_NODE:
            continue
        node = memory.cache.tree.by_id[restore.node]
        memory.pages.give(restore.pages, of_tree(node.edge.id), node.start // PAGE_TOKENS)
        _give_back(memory, memory.cache.restore(restore))
    for opening in reservation.opened:
        _open(memory, opening)
    for extension in reservation.extended:
        lease_pages = memory.leases[extension.seq].pages
        memory.pages.give(extension.pages, of_lease(extension.seq), len(lease_pages))
        lease_pages.extend(extension.pages)
    for publication in reservation.published:
        _give_back(memory, memory.cache.publish(memory.leases[publication.seq], publication))
    for saving in reservation.saved:
        memory.leases[saving.seq].snapshots.append(saving.snapshot)
        memory.slots.give(saving.snapshot.slot, of_lease(saving.seq))
    for seq in reservation.closed:
        _close(memory, memory.leases.pop(seq))
    for compress in work.state_compressions:
        memory.pages.give(compress.pages, of_compressed_state(compress.node), 0)
        _give_back(memory, memory.cache.compress_state(compress.node, compress.pages))
    for kv_compress in work.kv_compressions:
        memory.pages.give(kv_compress.compressed, of_compressed_kv(kv_compress.node), 0)
        _give_back(memory, memory.cache.compress_kv(kv_compress))
    for eviction in reservation.evicted:
        _give_back(memory, memory.cache.evict(eviction))
    memory.version += 1


def _move(memory: MemoryState, moves: Moves) -> None:
    """Move items, which keep their owner; their old places become free."""
    pages, slots, tree = memory.pages, memory.slots, memory.cache.tree
    vacated = Freed([copy.src for copy in moves.pages])
    for page in moves.pages:
        owner, index = pages.owners[page.src], pages.indexes[page.src]
        seq, state, kv = lease_of(owner), state_node_of(owner), kv_node_of(owner)
        if seq is not None:
            memory.leases[seq].pages[index] = page.dst
        elif state is not None:
            memory.cache.compressed_states.pages[NodeId(state)][index] = page.dst
        elif kv is not None:
            memory.cache.compressed_kv.by_node[NodeId(kv)].move(index, page.dst)
        else:
            tree.replace_page(owner, index, page.dst)
        pages.give([page.dst], owner, index)
    for patch in moves.table_patches:
        memory.leases[patch.seq].pages[patch.first_index : patch.first_index + len(patch.pages)] = patch.pages
    for slot in moves.slots:
        owner, epoch = slots.owners[slot.src], slots.epochs[slot.dst]
        seq = lease_of(owner)
        if seq is not None:
            memory.leases[seq].move_slot(slot.src, slot.dst, epoch)
        else:
            tree.replace_slot(owner, slot.dst, epoch)
        slots.give(slot.dst, owner)
        vacated.slots.append((slot.src, slots.epochs[slot.src]))
    _give_back(memory, vacated)


def _open(memory: MemoryState, opening: Opening) -> None:
    assert opening.seq not in memory.leases, f"sequence {opening.seq} has a lease"
    match = opening.match
    lease = Lease(
        opening.seq,
        list(opening.pages),
        opening.slot,
        opening.epoch,
        match.cached_tokens,
        match.salt,
        match.cached_tokens // PAGE_TOKENS * PAGE_TOKENS,
        loads=opening.loads,
        inexact=opening.inexact,
    )
    memory.leases[opening.seq] = lease
    first = memory.plan.pages_for(lease.shared_tokens)
    memory.pages.give(opening.pages[first:], of_lease(opening.seq), first)
    if opening.slot != NO_SLOT:
        memory.slots.give(opening.slot, of_lease(opening.seq))
    memory.cache.opened(lease, opening)


def _close(memory: MemoryState, lease: Lease) -> None:
    freed = memory.cache.release(lease)
    freed.pages += lease.pages[memory.plan.pages_for(lease.shared_tokens) :]
    if lease.slot != NO_SLOT:
        freed.slots.append((lease.slot, lease.epoch))
    freed.slots += [(snapshot.slot, snapshot.epoch) for snapshot in lease.snapshots]
    _give_back(memory, freed)


def _give_back(memory: MemoryState, freed: Freed) -> None:
    _release(memory.arena, memory.pages.drop(freed.pages), FrameKind.PAGES)
    for slot, epoch in freed.slots:
        _release(memory.arena, memory.slots.drop(slot, epoch), FrameKind.SLOTS)


def _release(arena: Arena, frames: Sequence[FrameId], kind: FrameKind) -> None:
    for frame in frames:
        arena.release(frame, kind)
