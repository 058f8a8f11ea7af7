"""What leaves the prefix cache first: two orders, and a choice that is a pure function of them.

    class 0   bare KV         leaves that no checkpoint and no lease needs         oldest first
    class 1   checkpoints     any of them, also inside the tree and on the path    as the policy ranks
                              of a lease: its KV stays, the state alone goes      them (policy.py)

    demand --choose--> [trim a bare leaf] ... [take a checkpoint, then the KV that it leaves bare] ...

Where KV may be compressed (packed_kv.py) and states (compression.py), that comes between the two, and states are
evicted for what is still missing.

A lease holds KV, never a checkpoint: it copied the state when it opened. So every checkpoint can go at
any moment, and a sequence that is alone can have the whole arena but what it reads itself (law L3).

What is enough is said by ``pressure.Demand``: in pages, slots and whole frames, wherever they lie, as what
stays is moved together (compaction.py). Bare KV goes first whatever is short: in a model with states nothing
can be resumed from it. A leaf is cut from its end, so that no more is lost than is wanted. In a model
without states KV is all there is, and class 0 is plain LRU.

Where several slots share a frame, one state that goes alone empties none. Of the states next in turn that
together would, one at a leaf goes first: its KV goes with it, and that may be all it takes.

What somebody is sure to come for (a preempted sequence, the head of the queue that room is made for) is named
by ``last`` and goes when nothing else is left: it is put off, never held, so nobody can wait for ever because
of it. Nor is its KV compressed.

``choose`` changes nothing. It follows its own choices (a parent that becomes bare, KV whose checkpoint was
chosen) in an overlay, looks at no more nodes than it chooses, is told to leave alone, and are slots in a
frame, and stops at ``EVICTIONS_PER_STEP`` (law L11). Whoever wants a better policy writes another
``choose``.

Rejected: leases that hold checkpoints (a second slot for each running sequence, and a sequence that fits
alone might not); evicting whole edges (a cached prompt of 100,000 tokens for one page); a clock over all
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
from weft.memory.prefix.tree import COMPRESSED, Node
from weft.memory.values import Eviction, NodeId
from weft.units import PAD

EVICTIONS_PER_STEP = 64
"""Nodes that one reservation may cut, remove or rob of their checkpoint."""
NO_COMPRESSION = CompressionRoom(0, 0)
NO_KV_COMPRESSION = KvCompression(None)




class Recency:
    """The two classes, oldest first; O(1) for every change. Only a commit changes them. ``in_slots``: of the
    checkpoints those that are not compressed."""

    __slots__ = ("bare", "in_slots", "states")

    def __init__(self) -> None:
        self.bare: OrderedDict[NodeId, Node] = OrderedDict()
        self.states: OrderedDict[NodeId, Node] = OrderedDict()
        self.in_slots: OrderedDict[NodeId, Node] = OrderedDict()

    def refresh(self, node: Node, *, newest: bool) -> None:
        """Put ``node`` into the classes it belongs to now. A bare node that is new in its class is the
        ``newest`` there, or the oldest: KV whose checkpoint or children were evicted."""
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
        """``node`` is gone."""
        for nodes in (self.bare, self.states, self.in_slots):
            nodes.pop(node.id, None)


class _Overlay:
    """The tree as it would be after the evictions chosen so far."""

    __slots__ = ("_gone_children", "_stateless")

    def __init__(self) -> None:
        self._gone_children: dict[NodeId, int] = {}
        self._stateless: set[NodeId] = set()

    def lose_state(self, node: Node) -> None:
        self._stateless.add(node.id)

    def remove(self, node: Node) -> Node:
        """``node`` goes; returns its parent."""
        assert node.parent is not None
        self._gone_children[node.parent.id] = self._gone_children.get(node.parent.id, 0) + 1
        return node.parent

    def bare(self, node: Node) -> bool:
        return (node.slot == PAD or node.id in self._stateless) and self.leaf(node)

    def leaf(self, node: Node) -> bool:
        """Nothing but its own checkpoint needs the KV of ``node``."""
        return (node.parent is not None and not node.holds
                and len(node.children) == self._gone_children.get(node.id, 0))


def choose(order: Recency, demand: Demand, *, ranked: Iterable[Node] = (), spared: Container[NodeId] = (),
           last: Sequence[NodeId] = (), limit: int = EVICTIONS_PER_STEP,
           compression: CompressionRoom = NO_COMPRESSION, packed_kv: KvCompression = NO_KV_COMPRESSION) -> list[Eviction]:
    """Evictions after which ``demand`` is met, in the order in which to carry them out, or as many as there
    are up to ``limit``. Checkpoints go as ``ranked``, and what it leaves out by recency. Nodes in ``spared``
    are left alone; those of ``last`` go after all others, its first one at the very end. In a model without
    attention edges go by themselves with their checkpoints."""
    chosen: list[Eviction] = []
    overlay = _Overlay()
    left_bare: list[Node] = []
    compressed: set[NodeId] = set()
    late = {name: None for name in reversed(last) if name not in spared}
    bare = chain(_others(order.bare, spared, late), _named(list(late), order.bare))
    states = _States(_in_turn(ranked, order.states, spared, late), overlay.leaf)
    late_states = _named(list(late), order.states)
    pages = slots = 0

    def now_bare(node: Node) -> None:
        stays = node.id in spared or node.id in late or packed_kv.is_chosen(node)
        if node.page_count and overlay.bare(node) and not stays:
            left_bare.append(node)

    while len(chosen) < limit and not demand.met(pages, slots):
        node = left_bare.pop() if left_bare else next(bare, None)
        if node is not None:
            held = packed_kv.pages_of(node)
            dropped = held if packed_kv.is_compressed(node) else min(held, demand.pages_missing(pages, slots))
            pages += dropped
            chosen.append(Eviction(node.id, "kv", held - dropped))
            if dropped == held:
                now_bare(overlay.remove(node))
            continue
        gain = packed_kv.compress_next(spared, late)
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
            now_bare(overlay.remove(node))
        else:
            now_bare(node)
    return chosen


class _States:
    """Checkpoints in turn; but of the next few, a leaf before the others."""

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
    """Every checkpoint once; what is ranked and is none is passed over."""
    named: set[NodeId] = set()
    for node in ranked:
        if node.id not in named and states.get(node.id) is node:
            named.add(node.id)
            if not any(node.id in names for names in left_out):
                yield node
    for node in _others(states, *left_out):
        if node.id not in named:
            yield node


def _named(names: Iterable[NodeId], nodes: OrderedDict[NodeId, Node]) -> Iterator[Node]:
    return (nodes[name] for name in names if name in nodes)


def _others(nodes: OrderedDict[NodeId, Node], *left_out: Container[NodeId]) -> Iterator[Node]:
    return (node for name, node in nodes.items() if not any(name in names for names in left_out))
