"""What leaves the prefix cache first: two orders, and a choice that is a pure function of them.

    class 0   bare KV         leaves that no checkpoint and no lease needs         oldest first
    class 1   checkpoints     all of them, inside the tree and on the path of      as the policy ranks
                              a lease too: the state alone goes, its KV stays      them (policy.py)

    demand --choose--> [trim a bare leaf] ... [evict a checkpoint, then the KV that becomes bare] ...

If KV or states may be compressed (compressed_kv.py, compressed_state.py), that comes between the two classes.
States are evicted for what is still missing.

A lease holds KV, never a checkpoint: it copied the state when it opened. So any checkpoint can go at any
moment. A sequence that runs alone can have the whole arena except the KV that it reads itself (law L3).

``pressure.Demand`` says what is enough: pages, slots and whole frames, wherever they lie, because compaction
moves the rest together (compaction.py). Bare KV goes first, whatever is short: in a model with states nothing
resumes from it. A leaf is cut from its end, so no more is lost than necessary. In a model without states all
cached data is KV, and class 0 is plain LRU.

If several slots share a frame, evicting one of them frees no frame. So the choice looks at the next states
that would free a frame together. One at a leaf goes first: its KV goes with it, and that may be enough.

``last`` names what will surely be used: by a preempted sequence, by a request for which a store has read it,
or by the head of the queue. It goes when nothing else is left, and its KV is not compressed. It is deferred,
never held, so no request waits for ever because of it.

``choose`` changes nothing. It follows its own choices (a parent that becomes bare, KV of a chosen checkpoint)
in an overlay. It looks at the nodes that it chooses, those that it must spare, and as many more as a frame
has slots. It stops at ``EVICTIONS_PER_STEP`` (law L11).

Rejected: leases that hold checkpoints (a second slot for each running sequence, and a sequence that fits
alone might not); evicting whole nodes (a cached prompt of 100,000 tokens for one page); a clock over all
nodes (work that grows with the tree).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from weft.memory.frames.pressure import Demand
from weft.memory.prefix.compressed_kv import KvCompression
from weft.memory.prefix.compressed_state import CompressionRoom
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.values import Eviction, NodeId
from weft.units import PAD

EVICTIONS_PER_STEP = 64
"""Nodes that one reservation may cut or remove, or whose checkpoint it may evict."""
NO_COMPRESSION = CompressionRoom(0, 0)
NO_KV_COMPRESSION = KvCompression(None)


class Recency:
    """The two classes, oldest first; every change is O(1). Only a commit changes them. ``in_slots``: the
    checkpoints that are not compressed."""

    __slots__ = ("bare", "in_slots", "states")

    def __init__(self) -> None:
        self.bare: OrderedDict[NodeId, Node] = OrderedDict()
        self.states: OrderedDict[NodeId, Node] = OrderedDict()
        self.in_slots: OrderedDict[NodeId, Node] = OrderedDict()

    def refresh(self, node: Node, *, newest: bool) -> None:
        """Put ``node`` into the classes it belongs to now. A node that just became bare enters as the
        ``newest``; as the oldest if its checkpoint or children were evicted."""
        if node.slot == PAD:
            self.states.pop(node.id, None)
        elif node.id not in self.states:
            self.states[node.id] = node
        if node.slot < 0:
            self.in_slots.pop(node.id, None)
        elif node.id not in self.in_slots:
            self.in_slots[node.id] = node
        if not node.bare or node.parent is None:
            self.bare.pop(node.id, None)
        elif node.id not in self.bare:
            self.bare[node.id] = node
            self.bare.move_to_end(node.id, last=newest)

    def touch(self, node: Node) -> None:
        """The checkpoint of ``node`` was used."""
        self.states.move_to_end(node.id)
        if node.id in self.in_slots:
            self.in_slots.move_to_end(node.id)

    def forget(self, node: Node) -> None:
        """``node`` was removed."""
        for nodes in (self.bare, self.states, self.in_slots):
            nodes.pop(node.id, None)


class _Overlay:
    """The tree as it would be after the evictions chosen so far."""

    __slots__ = ("_removed_children", "_stateless")

    def __init__(self) -> None:
        self._removed_children: dict[NodeId, int] = {}
        self._stateless: set[NodeId] = set()

    def lose_state(self, node: Node) -> None:
        self._stateless.add(node.id)

    def remove(self, node: Node) -> Node:
        """``node`` is removed; returns its parent."""
        assert node.parent is not None
        self._removed_children[node.parent.id] = self._removed_children.get(node.parent.id, 0) + 1
        return node.parent

    def bare(self, node: Node) -> bool:
        return (node.slot == PAD or node.id in self._stateless) and self.leaf(node)

    def leaf(self, node: Node) -> bool:
        """Only its own checkpoint needs the KV of ``node``."""
        return (node.parent is not None and not node.holds
                and len(node.children) == self._removed_children.get(node.id, 0))


def choose(order: Recency, demand: Demand, *, ranked: Iterable[Node] = (), spared: Container[NodeId] = (),
           last: Sequence[NodeId] = (), limit: int = EVICTIONS_PER_STEP,
           compression: CompressionRoom = NO_COMPRESSION,
           kv_compression: KvCompression = NO_KV_COMPRESSION) -> list[Eviction]:
    """Evictions that meet ``demand``, in the order in which to carry them out; fewer if ``limit`` ends them.
    Checkpoints go in the order ``ranked``, and those it leaves out by recency. Nodes in ``spared`` stay.
    Those of ``last`` go after all others, the first of them at the very end. In a model without attention,
    nodes go with their checkpoints."""
    chosen: list[Eviction] = []
    overlay = _Overlay()
    newly_bare: list[Node] = []
    compressed: set[NodeId] = set()
    late = {node_id: None for node_id in reversed(last) if node_id not in spared}
    bare = chain(_others(order.bare, spared, late), _by_id(list(late), order.bare))
    states = _States(_in_turn(ranked, order.states, spared, late), overlay.leaf)
    late_states = _by_id(list(late), order.states)
    pages = slots = 0

    def add_if_bare(node: Node) -> None:
        stays = node.id in spared or node.id in late or kv_compression.is_chosen(node)
        if node.page_count and overlay.bare(node) and not stays:
            newly_bare.append(node)

    while len(chosen) < limit and not demand.met(pages, slots):
        node = newly_bare.pop() if newly_bare else next(bare, None)
        if node is not None:
            page_count = kv_compression.pages_of(node)
            dropped = (page_count if kv_compression.is_compressed(node)
                       else min(page_count, demand.pages_missing(pages, slots)))
            pages += dropped
            chosen.append(Eviction(node.id, "kv", page_count - dropped))
            if dropped == page_count:
                add_if_bare(overlay.remove(node))
            continue
        gain = kv_compression.compress_next(spared, late)
        if gain is not None:
            chosen.append(Eviction(gain.node, "pages"))
            pages += gain.pages
            continue
        if compression.at_once > 0:
            for node in compression.choose(order.in_slots.values(), spared, demand, pages, slots):
                chosen.append(Eviction(node.id, "slot"))
                pages, slots = pages - compression.pages_each, slots + 1
                compressed.add(node.id)
            compression = replace(compression, at_once=0)
            continue
        node = states.next(demand.slots_to_a_frame(slots)) or next(late_states, None)
        if node is None:
            break
        late.pop(node.id, None)
        if node.id in compressed:
            continue
        chosen.append(Eviction(node.id, "state"))
        if node.slot == COMPRESSED:
            pages += compression.pages_each
        else:
            slots += 1
        overlay.lose_state(node)
        if node.is_tail:
            pages += node.page_count
            add_if_bare(overlay.remove(node))
        else:
            add_if_bare(node)
    return chosen


class _States:
    """Checkpoints in order, except that a leaf precedes the others among the next few."""

    __slots__ = ("_is_leaf", "_nodes", "_seen")

    def __init__(self, nodes: Iterator[Node], is_leaf: Callable[[Node], bool]) -> None:
        self._nodes = nodes
        self._is_leaf = is_leaf
        self._seen: list[Node] = []

    def next(self, few: int) -> Node | None:
        while len(self._seen) < min(few, EVICTIONS_PER_STEP):
            node = next(self._nodes, None)
            if node is None:
                break
            self._seen.append(node)
        leaves = (at for at, node in enumerate(self._seen[:few]) if node.page_count and self._is_leaf(node))
        return self._seen.pop(next(leaves, 0)) if self._seen else None


def _in_turn(ranked: Iterable[Node], states: OrderedDict[NodeId, Node],
             *left_out: Container[NodeId]) -> Iterator[Node]:
    """Every checkpoint once, the ranked ones first. A ranked node without a checkpoint is skipped."""
    seen: set[NodeId] = set()
    for node in ranked:
        if node.id not in seen and states.get(node.id) is node:
            seen.add(node.id)
            if not any(node.id in ids for ids in left_out):
                yield node
    for node in _others(states, *left_out):
        if node.id not in seen:
            yield node


def _by_id(ids: Iterable[NodeId], nodes: OrderedDict[NodeId, Node]) -> Iterator[Node]:
    return (nodes[node_id] for node_id in ids if node_id in nodes)


def _others(nodes: OrderedDict[NodeId, Node], *left_out: Container[NodeId]) -> Iterator[Node]:
    return (node for node_id, node in nodes.items() if not any(node_id in ids for ids in left_out))
