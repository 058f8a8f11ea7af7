"""The prefix cache: the tree and the orders of eviction, changed together.

    open on a match      hold the path; the anchor becomes the newest snapshot
    publish              the tree adopts pages and slots of a lease, which reads them from then on
    evict, compress      what ``eviction.choose`` chose
    restore              exact pages for compressed KV on the path of an opening
    release              a lease ends; what nothing needs any more becomes evictable

Only ``state.apply`` calls the methods that write. Pages and slots that an operation frees are returned
as ``Freed``: this file allocates and frees nothing. Data that no request can ever use goes at once: a tail
without its snapshot, and in a model without attention every node that leads to no snapshot.

A model without states resumes anywhere: a hit is as far as complete pages match. A model with states resumes at
snapshots only (law L8), and tokens that match beyond them are counted as lost, by reason.

Laws: L1 (audited from leases and nodes), L7 (pages of the tree are full, or copied before use), L8, L10.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from weft.memory.arena_work import CompressKv, RestoreKv
from weft.memory.frames.arena import of_tree
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.compressed_kv import CompressedKv
from weft.memory.prefix.edge import COMPRESSED, PAGE_KEY_BYTES, TOKEN_BYTES, Node
from weft.memory.prefix.eviction import CompressedStates, Recency
from weft.memory.prefix.pins import Pins
from weft.memory.prefix.policy import Policy
from weft.memory.prefix.tree import Owners, PrefixTree, note_change
from weft.memory.reservation import Lease, Opening, Publication
from weft.memory.usage import CacheCounts
from weft.memory.values import NO_NODE, NO_SLOT, NOTHING_RECALLED, Eviction, Lost, Match, NodeId, Snapshot
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId

Int32s = npt.NDArray[np.int32]
SALTS_MAX = 64
"""Most salts, the oldest first, in which a match looks for tokens lost to a salt (law L11)."""


@dataclass(slots=True)
class Freed:
    """Pages and slot claims without an owner."""

    pages: list[PageId] = field(default_factory=list)
    slots: list[tuple[SlotId, int]] = field(default_factory=list)


class PrefixCache:
    """The prefix cache. ``enabled`` False: it caches nothing, and every lookup misses. Owners of pages and slots are
    entered into ``page_owners`` and ``slot_owners``."""

    __slots__ = (
        "compressed_kv",
        "compressed_states",
        "counts",
        "enabled",
        "new_snapshots",
        "order",
        "pins",
        "plan",
        "policy",
        "stateful",
        "tree",
    )

    def __init__(
        self,
        plan: ArenaPlan,
        *,
        enabled: bool,
        page_owners: Owners,
        slot_owners: Owners,
        policy: Policy | None = None,
        pins_bytes: int = 0,
    ) -> None:
        self.plan = plan
        self.policy = policy or Policy()
        self.enabled = enabled
        self.stateful = plan.slots_per_frame > 0
        self.tree = PrefixTree(paged=plan.pages_per_frame > 0, page_owners=page_owners, slot_owners=slot_owners)
        self.order = Recency()
        self.pins = Pins(self.tree, plan, pins_bytes)
        self.compressed_states = CompressedStates()
        self.compressed_kv = CompressedKv(plan)
        self.counts = CacheCounts()
        self.new_snapshots: deque[NodeId] | None = None
        """Nodes with a snapshot that was computed, for a store that takes them out; None without one."""

    # ------------------------------------------------------------------ reading

    @property
    def evictable(self) -> tuple[int, int]:
        """Pages and slots that evictions can free: pages that no lease reads, and every snapshot."""
        return self.page_count - self.tree.held_page_count, self.tree.slot_count

    @property
    def page_count(self) -> int:
        """Pages that belong to the tree: KV, compressed KV and compressed states."""
        kv = self.compressed_kv
        return self.tree.page_count - kv.record_count + kv.page_count + self.compressed_states.page_count

    def evictable_except(self, nodes: Iterable[NodeId]) -> tuple[int, int]:
        """Return ``evictable`` if the snapshots of ``nodes`` stay, with the KV that they need."""
        pages, slots = self.evictable
        counted: set[NodeId] = set()
        for node_id in nodes:
            node = self.tree.by_id.get(node_id)
            if node is None:
                continue
            slots -= node.slot >= 0
            pages -= self.plan.compressed_pages if node.slot == COMPRESSED else 0
            while node is not None and not node.holds and node.id not in counted:
                counted.add(node.id)
                pages -= self.compressed_kv.pages_of(node)
                node = node.parent
        return pages, slots

    @property
    def evictable_bytes(self) -> int:
        pages, slots = self.evictable
        return pages * self.plan.page_bytes + slots * self.plan.slot_stride_bytes

    def match(self, tokens: Int32s, salt: str, version: int) -> Match:
        """Return the cached prefix of ``tokens``. Reads only. At least the last token is left to compute, because its
        logits choose the next one."""
        deepest = None
        if self.enabled and len(tokens) > 1:
            deepest = self.tree.find(salt, tokens[:-1].tobytes())
        if deepest is None:
            return Match(salt=salt, version=version)
        if not self.stateful:
            anchor = deepest.partly or deepest.node
            return Match(
                deepest.kv_tokens,
                Lost(evicted_kv=deepest.kv_lost_tokens),
                deepest.kv_tokens,
                anchor.id if deepest.kv_tokens else NO_NODE,
                salt,
                version,
                restore_pages=self.compressed_kv.restore_pages(anchor),
            )
        cached = deepest.anchor.end if deepest.anchor is not None else 0
        reached = max(cached, deepest.state_lost_at)
        lost = Lost(
            no_checkpoint=deepest.kv_tokens - reached, evicted_state=reached - cached, evicted_kv=deepest.kv_lost_tokens
        )
        return Match(
            cached,
            lost,
            deepest.kv_tokens,
            deepest.anchor.id if deepest.anchor is not None else NO_NODE,
            salt,
            version,
            restore_pages=self.compressed_kv.restore_pages(deepest.anchor),
        )

    def node(self, lease: Lease) -> Node | None:
        """Return the node that ``lease`` holds."""
        return self.tree.by_id[lease.shared_node] if lease.shared_node != NO_NODE else None

    # ------------------------------------------------------------------ writing, by a commit

    def opened(self, lease: Lease, opening: Opening) -> None:
        """Hold the nodes that ``lease``, which opens on a match, reads."""
        match, counts = opening.match, self.counts
        if opening.loads:
            self._opened_to_load(lease, match)
            return
        counts.opened += 1
        counts.hits += match.cached_tokens > 0
        counts.hit_tokens += match.cached_tokens
        counts.lost += match.lost
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
        used = anchor if self.stateful else self.tree.by_id[lease.shared_node]
        used.hits += 1
        used.used_at = self.tree.version
        counts.hits_inexact += lease.inexact

    def _opened_to_load(self, lease: Lease, match: Match) -> None:
        """Note an opening for a load. No request has used the cache: counts and orders stay. The policy learns where
        the path begins."""
        anchor = self.tree.by_id[match.anchor] if match.anchor != NO_NODE else None
        self.policy.opened(lease.seq, replace(match, recall=NOTHING_RECALLED), anchor)
        if lease.shared_tokens and anchor is not None:
            self._hold(lease, self.tree.node_ending(anchor, lease.shared_tokens))

    def restore(self, restore: RestoreKv) -> Freed:
        """Restore compressed KV; the caller enters the owners of its pages."""
        node = self.tree.by_id[restore.node]
        compressed = self.compressed_kv.leave(node)
        node.edge.set_pages(node.start, restore.pages)
        self.counts.restored_pages += len(restore.pages)
        restored = set(restore.pages)
        return Freed([page for page in compressed if page not in restored])

    def publish(self, lease: Lease, publication: Publication) -> Freed:
        """Add the pages of a lease that the tree lacks. Where the tree has the tokens, the lease adopts the tree's
        pages and its own are freed. Duplicate snapshots are freed too."""
        tree, plan = self.tree, self.plan
        base = self.node(lease) or tree.root(lease.salt)
        done = (base.end - publication.start) // PAGE_TOKENS
        tokens = publication.tokens
        whole = len(tokens) // PAGE_KEY_BYTES
        pages = list(publication.pages[done:])
        node, cached_end = tree.insert(base, tokens[done * PAGE_KEY_BYTES : whole * PAGE_KEY_BYTES], pages)
        assert cached_end == publication.cached_end, (
            f"{cached_end} tokens were cached, planned as {publication.cached_end}"
        )
        first, end = plan.pages_for(base.end), plan.pages_for(node.end)
        freed = Freed([own for own, shared in zip(lease.pages[first:end], pages, strict=True) if own != shared])
        lease.pages[first:end] = pages
        lease.shared_tokens = node.end
        inexact = lease.inexact
        freed.pages += self._adopt(lease, base, node, cached_end)
        if node is not base:
            self._hold(lease, node)
        self.policy.published(lease.seq, lease.salt, publication.start, tokens)
        for save in publication.saves:
            self._save(lease, node, save, tokens[whole * PAGE_KEY_BYTES :], freed, inexact=inexact)
        if not self.stateful and node.end:
            self.pins.came(node)
            _note_new(self, lease, node)
        self.counts.published += 1
        return freed

    def _adopt(self, lease: Lease, base: Node, end: Node, cached_end: int) -> list[PageId]:
        """Give the tree and the lease the same pages from ``base`` to ``end``. Nodes that were compressed, or inexact
        without readers, adopt the pages of the lease and are as exact as the lease. Other nodes up to ``cached_end``
        give their pages to the lease, which is as exact as they are. Returns the pages that the tree gives up."""
        freed: list[PageId] = []
        exactly, node = not lease.inexact, end
        while node is not base:
            own = lease.pages[self.plan.pages_for(node.start) : self.plan.pages_for(node.end)]
            compressed = self.compressed_kv.compressed_node(node)
            adopted = compressed is not None or node.pages != own
            if adopted:
                freed += node.pages if compressed is None else self.compressed_kv.cut_front(compressed, len(own))
                node.edge.set_pages(node.start, own)
                for page in own:
                    self.tree.page_owners[page] = of_tree(node.edge.id)
            if adopted or node.start >= cached_end:
                node.kv_inexact = not exactly
            lease.inexact |= node.kv_inexact
            assert node.parent is not None
            node = node.parent
        return freed

    def _save(self, lease: Lease, path: Node, save: Snapshot, rest: bytes, freed: Freed, *, inexact: bool) -> None:
        """Move the claim of ``save`` from the lease to the node that ends at its position. ``inexact``: the state was
        computed from inexact data."""
        ended = save.slot == lease.slot
        if ended:
            lease.slot = NO_SLOT
        else:
            lease.snapshots.remove(save)
        node: Node | None
        if save.position <= path.end:
            node = self.tree.node_ending(path, save.position)
        else:
            assert save.position == path.end + len(rest) // TOKEN_BYTES
            index = self.plan.pages_for(path.end)
            node = self.tree.add_tail(path, rest, lease.pages[index : index + 1])
            if node is not None:
                node.kv_inexact = inexact
                del lease.pages[index : index + 1]
        if node is None:
            node = path.children[rest]
        if node.slot == PAD:
            self.tree.set_slot(node, save.slot, save.epoch)
            node.state_inexact = inexact
            self.order.refresh(node, newest=True)
            self.policy.saved(lease.seq, node, rest, ended=ended)
            self.pins.came(node)
            _note_new(self, lease, node)
            return
        self.order.touch(node)
        self.policy.duplicated(node)
        freed.slots.append((save.slot, save.epoch))

    def release(self, lease: Lease) -> Freed:
        """Release the pages of ``lease``, which ends and reads nothing from now on."""
        freed = Freed()
        node = self.node(lease)
        if node is not None:
            lease.shared_node = NO_NODE
            self.tree.release(node)
            self.compressed_kv.stop_reading(node)
            self._refile(node, freed, newest=True)
        self.policy.closed(lease.seq, node)
        return freed

    def evict(self, eviction: Eviction) -> Freed:
        """Carry out one chosen eviction."""
        node = self.tree.by_id[eviction.node]
        freed, state_pages = Freed(), []
        if eviction.what == "state":
            self.policy.evicted(node)
            if node.slot == COMPRESSED:
                state_pages = self.compressed_states.leave(node)
                node.lose_state()
                note_change(self.tree, node)
            else:
                freed.slots.append(self.tree.take_slot(node))
            self.counts.evicted_states += 1
            self.counts.evicted_tails += node.is_tail
            self.pins.went(node)
            self._refile(node, freed, newest=False)
        elif eviction.pages_left:
            freed.pages += self.tree.trim(node, eviction.pages_left)
            self.pins.went(node)
        else:
            self._remove(node, freed)
        self.counts.evicted_pages += len(freed.pages)
        freed.pages += state_pages
        return freed

    def compress_state(self, node_id: NodeId, pages: Sequence[PageId]) -> Freed:
        """Move the snapshot of node ``node_id`` from its slot to ``pages``."""
        node = self.tree.by_id[node_id]
        self.compressed_states.enter(node, pages)
        node.state_inexact = True
        freed = Freed(slots=[self.tree.take_slot(node, COMPRESSED)])
        self.order.refresh(node, newest=False)
        self.counts.compressed += 1
        return freed

    def compress_kv(self, compress: CompressKv) -> Freed:
        """Compress the KV of a node into the first of its own pages; the caller enters their owners."""
        self.counts.compressed_pages += len(compress.pages)
        return Freed(self.compressed_kv.enter(self.tree.by_id[compress.node], compress.compressed_count))

    def _hold(self, lease: Lease, node: Node) -> None:
        before = self.node(lease)
        ancestor: Node | None = node
        while ancestor is not None and ancestor is not before:
            lease.inexact |= ancestor.kv_inexact
            ancestor = ancestor.parent
        self.compressed_kv.start_reading(node)
        self.tree.hold(node)
        self.order.refresh(node, newest=True)
        if node.parent is not None:
            self.order.refresh(node.parent, newest=True)  # perhaps a bare leaf before this node
        lease.shared_node = node.id
        if before is not None:
            self.tree.release(before)

    def _refile(self, node: Node, freed: Freed, *, newest: bool) -> None:
        """Remove ``node``, which lost a lease, a child or its snapshot, or update its classes."""
        useless = node.bare and node.parent is not None and (node.is_tail or not self.tree.paged)
        if useless:
            self._remove(node, freed)
        else:
            self.order.refresh(node, newest=newest)

    def _remove(self, node: Node, freed: Freed) -> None:
        parent = node.parent
        assert parent is not None
        compressed = self.compressed_kv.leave(node) if node.id in self.compressed_kv.by_node else None
        pages = self.tree.remove(node)
        freed.pages += pages if compressed is None else compressed
        self.order.forget(node)
        self.compressed_kv.forget(node)
        self.pins.went(node)
        if parent.parent is not None:
            self._refile(parent, freed, newest=False)
            self.policy.child_removed(parent)


def _note_new(cache: PrefixCache, lease: Lease, node: Node) -> None:
    """Note that ``lease`` added the snapshot of ``node``."""
    if lease.loads:
        cache.counts.loaded += 1
        cache.counts.loaded_tokens += node.end - lease.cached_tokens
    elif cache.new_snapshots is not None:
        cache.new_snapshots.append(node.id)


def with_lost_to_salt(cache: PrefixCache, tokens: npt.NDArray[np.int32], match: Match) -> Match:
    """Return ``match`` of ``tokens``, with the loss to the salt: tokens that another salt has, beyond those lost for
    other reasons.

    Each tenant computes the same tokens once (law L10), and the operator needs to know the cost of that. A
    tenant must not: for a prompt that a tenant composed, the number says whether another one sent it. So it is counted
    only with ``debug.count_salt``, and never reported to a request."""
    others = (name for name in cache.tree.roots if name != match.salt)
    most = max(
        (cache.match(tokens, name, match.version).cached_tokens for name in islice(others, SALTS_MAX)), default=0
    )
    missed = most - match.cached_tokens - match.lost.total
    return match if missed <= 0 else replace(match, lost=replace(match.lost, salt=missed))
