"""The prefix cache: the tree and the order of eviction, changed together.

    open on a match      hold the path, the anchor is the newest checkpoint
    publish              the tree takes over pages and slots of a lease, the lease reads them from then on
    evict, compress          what ``eviction.choose`` drafted
    restore              compressed KV on the way of who opens
    release              a lease ends; what nothing needs any more becomes evictable

Everything that writes is called by ``transaction.apply`` alone. Pages and slots that fall out of an
operation are returned as ``Freed`` and are given back there: this file allocates and frees nothing.

What nothing can ever use goes at once: a tail without its checkpoint, and in a model without attention
every edge that leads to none. Other bare KV stays until its bytes are wanted.

A model without states resumes anywhere: a hit is then as far as whole pages match. One with states
resumes at checkpoints only (law L8), and how much matched beyond them is counted by reason.

Laws: L1 (audited from leases and nodes), L7 (pages of the tree are full, or copied before use), L8, L10.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft.memory.arena_work import CompressKv, RestoreKv
from weft.memory.frames.owners import of_tree
from weft.memory.frames.plan import ArenaPlan
from weft.memory.lease import Lease
from weft.memory.prefix.compressed_kv import PackedKv
from weft.memory.prefix.compressed_state import CompressedStates
from weft.memory.prefix.edge import PAGE_KEY_BYTES, TOKEN_BYTES
from weft.memory.prefix.eviction import Recency
from weft.memory.prefix.policy import LeastRecentlyUsed, Policy
from weft.memory.prefix.tree import COMPRESSED, Node, Owners, PrefixTree
from weft.memory.reservation import Opening, Publication
from weft.memory.values import NO_NODE, NO_SLOT, Checkpoint, Eviction, Lost, Match, NodeId
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Freed:
    """Pages and slot claims that have no owner any more."""

    pages: list[PageId] = field(default_factory=list)
    slots: list[tuple[SlotId, int]] = field(default_factory=list)


@dataclass(slots=True)
class CacheCounts:
    """Since the start; they only grow. ``lost_*`` are tokens, by why an opened sequence could not use them:
    KV matched and no checkpoint was made there, the checkpoint was evicted, the KV was evicted, another
    sequence was computing them, only another namespace has them (0 where that is not looked at)."""

    opened: int = 0
    hits: int = 0
    hit_tokens: int = 0
    lost_no_checkpoint: int = 0
    lost_evicted_state: int = 0
    lost_evicted_kv: int = 0
    lost_not_ready: int = 0
    lost_salt: int = 0
    published: int = 0
    evicted_states: int = 0
    """Tails among them."""
    evicted_pages: int = 0
    """Bare KV, and a page for each tail."""
    evicted_tails: int = 0
    """Checkpoints inside a page: where a request had ended."""
    compressed: int = 0
    """Checkpoints that went into 8 bits."""
    restored: int = 0
    """Leases that were opened on one of those."""
    compressed_pages: int = 0
    """Pages of KV that went into 8 bits."""
    restored_pages: int = 0
    """Of them, those that were read again."""
    hits_inexact: int = 0
    """Leases that were opened on what was compressed once, or computed behind it."""


class PrefixCache:
    """``enabled`` False: nothing is ever kept, and every lookup misses. Whose pages and slots are is entered
    into ``page_owners`` and ``slot_owners``."""

    __slots__ = ("compressed", "counts", "enabled", "order", "packed_kv", "plan", "policy", "stateful", "tree")

    def __init__(self, plan: ArenaPlan, *, enabled: bool, page_owners: Owners, slot_owners: Owners,
                 policy: Policy | None = None) -> None:
        self.plan = plan
        self.policy = policy or LeastRecentlyUsed()
        self.enabled = enabled
        self.stateful = plan.slots_per_frame > 0
        self.tree = PrefixTree(paged=plan.pages_per_frame > 0, page_owners=page_owners,
                               slot_owners=slot_owners)
        self.order = Recency()
        self.compressed = CompressedStates()
        self.packed_kv = PackedKv(plan)
        self.counts = CacheCounts()

    # ------------------------------------------------------------------ reading

    @property
    def evictable(self) -> tuple[int, int]:
        """Pages and slots that evictions can free: what no lease reads, and every checkpoint."""
        return self.page_count - self.tree.held_page_count, self.tree.slot_count

    @property
    def page_count(self) -> int:
        """Pages that belong to the tree: KV, wide or compressed, and compressed states."""
        packed_kv = self.packed_kv
        return self.tree.page_count - packed_kv.record_count + packed_kv.page_count + self.compressed.page_count

    def evictable_but(self, names: Iterable[NodeId]) -> tuple[int, int]:
        """The same, where the checkpoints of the nodes ``names`` stay, with the KV that they need."""
        pages, slots = self.evictable
        kept: set[NodeId] = set()
        for name in names:
            node = self.tree.by_id.get(name)
            if node is None:
                continue
            slots -= node.slot >= 0
            pages -= self.plan.compressed_pages if node.slot == COMPRESSED else 0
            while node is not None and not node.holds and node.id not in kept:
                kept.add(node.id)
                pages -= self.packed_kv.pages_of(node)
                node = node.parent
        return pages, slots

    @property
    def evictable_bytes(self) -> int:
        pages, slots = self.evictable
        return pages * self.plan.page_bytes + slots * self.plan.slot_stride_bytes

    def match(self, tokens: Int32s, salt: str, version: int) -> Match:
        """Reads only. At least the last token is left to compute: its logits choose the next one."""
        found = None
        if self.enabled and len(tokens) > 1:
            found = self.tree.find(salt, tokens[:-1].tobytes())
        if found is None:
            return Match(salt=salt, version=version)
        if not self.stateful:
            anchor = found.partly or found.node
            return Match(found.kv_tokens, Lost(evicted_kv=found.kv_lost_tokens), found.kv_tokens,
                         anchor.id if found.kv_tokens else NO_NODE, salt, version,
                         restore_pages=self.packed_kv.restore_pages(anchor))
        cached = found.anchor.end if found.anchor is not None else 0
        reached = max(cached, found.state_lost_at)
        lost = Lost(no_checkpoint=found.kv_tokens - reached, evicted_state=reached - cached,
                    evicted_kv=found.kv_lost_tokens)
        return Match(cached, lost, found.kv_tokens,
                     found.anchor.id if found.anchor is not None else NO_NODE, salt, version,
                     restore_pages=self.packed_kv.restore_pages(found.anchor))

    def node(self, lease: Lease) -> Node | None:
        """The node that ``lease`` holds."""
        return self.tree.by_id[lease.held] if lease.held != NO_NODE else None

    # ------------------------------------------------------------------ writing, by a commit

    def opened(self, lease: Lease, opening: Opening) -> None:
        """``lease`` begins on a match: hold what it reads."""
        match, counts = opening.match, self.counts
        counts.opened += 1
        counts.hits += match.cached_tokens > 0
        counts.hit_tokens += match.cached_tokens
        counts.lost_no_checkpoint += match.lost.no_checkpoint
        counts.lost_evicted_state += match.lost.evicted_state
        counts.lost_evicted_kv += match.lost.evicted_kv
        counts.lost_not_ready += match.lost.not_ready
        counts.lost_salt += match.lost.salt
        if match.anchor == NO_NODE:
            self.policy.opened(lease.seq, match, None)
            return
        anchor = self.tree.by_id[match.anchor]
        self.policy.opened(lease.seq, match, anchor)
        counts.restored += anchor.slot == COMPRESSED
        lease.inexact = anchor.kv_inexact or (anchor.slot != PAD and anchor.state_inexact)
        if anchor.slot != PAD:
            self.order.touch(anchor)
        if lease.shared_tokens:
            self._hold(lease, self.tree.node_ending(anchor, lease.shared_tokens))
        used = anchor if self.stateful else self.tree.by_id[lease.held]
        used.hits += 1
        used.used_at = self.tree.version
        counts.hits_inexact += lease.inexact

    def restore(self, restore: RestoreKv) -> Freed:
        """Compressed KV is wide again; whose the pages are is for ``give``."""
        node = self.tree.by_id[restore.node]
        left = self.packed_kv.leave(node)
        node.edge.put(node.start, restore.pages)
        self.counts.restored_pages += len(restore.pages)
        kept = set(restore.pages)
        return Freed([page for page in left if page not in kept])

    def publish(self, lease: Lease, publication: Publication) -> Freed:
        """The tree takes over what it lacks; where it has the tokens already the lease reads the tree's
        pages and its own fall out. Checkpoints that are there already fall out too."""
        tree, plan = self.tree, self.plan
        base = self.node(lease) or tree.root(lease.salt)
        done = (base.end - publication.start) // PAGE_TOKENS
        tokens = publication.tokens
        whole = len(tokens) // PAGE_KEY_BYTES
        pages = list(publication.pages[done:])
        node, there = tree.insert(base, tokens[done * PAGE_KEY_BYTES:whole * PAGE_KEY_BYTES], pages)
        assert there == publication.cached_end, f"{there} tokens were there and not {publication.cached_end}"
        first, end = plan.pages_for(base.end), plan.pages_for(node.end)
        freed = Freed([own for own, kept in zip(lease.pages[first:end], pages, strict=True) if own != kept])
        lease.pages[first:end] = pages
        lease.shared_tokens = node.end
        inexact = lease.inexact
        freed.pages += self._give_over(lease, base, node, there)
        if node is not base:
            self._hold(lease, node)
        self.policy.published(lease.seq, lease.salt, publication.start, tokens)
        for save in publication.saves:
            self._keep(lease, node, save, tokens[whole * PAGE_KEY_BYTES:], freed, inexact=inexact)
        self.counts.published += 1
        return freed

    def _give_over(self, lease: Lease, base: Node, end: Node, there: int) -> list[PageId]:
        """From ``base`` to ``end`` the tree has what the lease has: what was compressed gets its pages, as exact
        as they are, and so does what the publication gives others. Of what else was there up to ``there`` the
        lease reads the tree's, and is as exact as that. Returns the pages that the tree had in place."""
        freed: list[PageId] = []
        exactly, node = not lease.inexact, end
        while node is not base:
            own = lease.pages[self.plan.pages_for(node.start):self.plan.pages_for(node.end)]
            compressed = self.packed_kv.packed(node)
            given = compressed is not None or node.pages != own
            if given:
                freed += node.pages if compressed is None else self.packed_kv.cut_front(compressed, len(own))
                node.edge.put(node.start, own)
                for page in own:
                    self.tree.page_owners[page] = of_tree(node.edge.id)
            if given or node.start >= there:
                node.kv_inexact = not exactly
            lease.inexact |= node.kv_inexact
            assert node.parent is not None
            node = node.parent
        return freed

    def _keep(self, lease: Lease, path: Node, save: Checkpoint, rest: bytes, freed: Freed, *,
              inexact: bool) -> None:
        """The claim of ``save`` leaves the lease for the node that ends at its position. ``inexact``: so was
        what it was computed from."""
        ended = save.slot == lease.slot
        if ended:
            lease.slot = NO_SLOT
        else:
            lease.taps.remove(save)
        node: Node | None
        if save.position <= path.end:
            node = self.tree.node_ending(path, save.position)
        else:
            assert save.position == path.end + len(rest) // TOKEN_BYTES
            at = self.plan.pages_for(path.end)
            node = self.tree.add_tail(path, rest, lease.pages[at:at + 1])
            if node is not None:
                node.kv_inexact = inexact
                del lease.pages[at:at + 1]
        if node is None:
            node = path.children[rest]
        if node.slot == PAD:
            self.tree.set_slot(node, save.slot, save.epoch)
            node.state_inexact = inexact
            self.order.refresh(node, newest=True)
            self.policy.kept(lease.seq, node, rest, ended=ended)
            return
        self.order.touch(node)
        self.policy.again(node)
        freed.slots.append((save.slot, save.epoch))

    def release(self, lease: Lease) -> Freed:
        """``lease`` ends and reads nothing any more."""
        freed = Freed()
        node = self.node(lease)
        if node is not None:
            lease.held = NO_NODE
            self.tree.release(node)
            self.packed_kv.left(node)
            self._settle(node, freed, newest=True)
        self.policy.left(lease.seq, node)
        return freed

    def evict(self, eviction: Eviction) -> Freed:
        """Carry out what was chosen."""
        node = self.tree.by_id[eviction.node]
        freed, compressed = Freed(), []
        if eviction.what == "state":
            self.policy.evicted(node)
            if node.slot == COMPRESSED:
                compressed = self.compressed.leave(node)
                self.tree.lose_state(node)
            else:
                freed.slots.append(self.tree.take_slot(node))
            self.counts.evicted_states += 1
            self.counts.evicted_tails += node.is_tail
            self._settle(node, freed, newest=False)
        elif eviction.pages_left:
            freed.pages += self.tree.trim(node, eviction.pages_left)
        else:
            self._remove(node, freed)
        self.counts.evicted_pages += len(freed.pages)
        freed.pages += compressed
        return freed

    def compress(self, name: NodeId, pages: Sequence[PageId]) -> Freed:
        """The checkpoint of node ``name`` goes from its slot to ``pages``."""
        node = self.tree.by_id[name]
        self.compressed.enter(node, pages)
        node.state_inexact = True
        freed = Freed(slots=[self.tree.take_slot(node, COMPRESSED)])
        self.order.refresh(node, newest=False)
        self.counts.compressed += 1
        return freed

    def compress_kv(self, compress: CompressKv) -> Freed:
        """The KV of a node goes into the first of its own pages; whose they are then is for ``give``."""
        self.counts.compressed_pages += len(compress.pages)
        return Freed(self.packed_kv.enter(self.tree.by_id[compress.node], compress.packed_count))

    def _hold(self, lease: Lease, node: Node) -> None:
        before = self.node(lease)
        at: Node | None = node
        while at is not None and at is not before:
            lease.inexact |= at.kv_inexact
            at = at.parent
        self.packed_kv.read(node)
        self.tree.hold(node)
        self.order.refresh(node, newest=True)
        if node.parent is not None:
            self.order.refresh(node.parent, newest=True)  # it was a bare leaf, perhaps, before this one came
        lease.held = node.id
        if before is not None:
            self.tree.release(before)

    def _settle(self, node: Node, freed: Freed, *, newest: bool) -> None:
        """``node`` lost a lease, a child or its checkpoint: it goes, or is filed anew."""
        useless = node.bare and node.parent is not None and (node.is_tail or not self.tree.paged)
        if useless:
            self._remove(node, freed)
        else:
            self.order.refresh(node, newest=newest)

    def _remove(self, node: Node, freed: Freed) -> None:
        parent = node.parent
        assert parent is not None
        compressed = self.packed_kv.leave(node) if node.id in self.packed_kv.by_node else None
        pages = self.tree.remove(node)
        freed.pages += pages if compressed is None else compressed
        self.order.forget(node)
        self.packed_kv.forget(node)
        if parent.parent is not None:
            self._settle(parent, freed, newest=False)
            self.policy.narrowed(parent)
