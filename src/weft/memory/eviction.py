"""What leaves the prefix cache first: two orders, and a choice that is a pure function of them.

    class 0   bare KV         leaves that no checkpoint and no lease needs         oldest first
    class 1   checkpoints     any of them, also inside the tree and on the path    oldest first
                              of a lease: its KV stays, the state alone goes

    wanted bytes --choose--> [trim a bare leaf] ... [take a checkpoint, then the KV that it leaves bare] ...

A lease holds KV, never a checkpoint: it copied the state when it opened. So every checkpoint can go at
any moment, and a sequence that is alone can have the whole arena but what it reads itself (law L3).

Both classes are counted in one currency, bytes, as a frame can hold either. Bare KV goes first whatever
is short: in a model with states nothing can be resumed from it. A leaf is cut from its end, so that no
more is lost than is wanted. In a model without states KV is all there is, and class 0 is plain LRU.

``choose`` changes nothing. It follows its own choices (a parent that becomes bare, KV whose checkpoint was
chosen) in an overlay, looks at no more nodes than it chooses and is told to leave alone, and stops at
``EVICTIONS_PER_STEP`` (law L11). Whoever wants a better policy writes another ``choose``.

Rejected: leases that hold checkpoints (a second slot for each running sequence, and a sequence that fits
alone might not); evicting whole edges (a cached prompt of 100,000 tokens for one page); a clock over all
nodes (work that grows with the tree).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal

from weft.memory.tree import Node, NodeId
from weft.units import PAD, ceil_div

EVICTIONS_PER_STEP = 64
"""Nodes that one reservation may cut, remove or rob of their checkpoint."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """``what`` "state": the checkpoint of ``node`` goes, and a tail goes whole. "kv": the pages of ``node``
    go but for the first ``pages_kept``; with none kept the node goes."""

    node: NodeId
    what: Literal["state", "kv"]
    pages_kept: int = 0


class Recency:
    """The two classes, oldest first; O(1) for every change. Only a commit changes them."""

    __slots__ = ("bare", "states")

    def __init__(self) -> None:
        self.bare: OrderedDict[NodeId, Node] = OrderedDict()
        self.states: OrderedDict[NodeId, Node] = OrderedDict()

    def refresh(self, node: Node, *, newest: bool) -> None:
        """Put ``node`` into the classes it belongs to now. A bare node that is new in its class is the
        ``newest`` there, or the oldest: KV whose checkpoint or children were evicted."""
        if node.slot == PAD:
            self.states.pop(node.id, None)
        elif node.id not in self.states:
            self.states[node.id] = node
        if not node.bare or node.parent is None:
            self.bare.pop(node.id, None)
        elif node.id not in self.bare:
            self.bare[node.id] = node
            self.bare.move_to_end(node.id, last=newest)

    def touch(self, node: Node) -> None:
        """The checkpoint of ``node`` was used."""
        self.states.move_to_end(node.id)


def pages_to_drop(bytes_wanted: int, page_bytes: int, held: int) -> int:
    """How many of ``held`` pages to give up for ``bytes_wanted``: no more than it takes."""
    return min(held, ceil_div(bytes_wanted, page_bytes))


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
        return (node.parent is not None and not node.holds
                and (node.slot == PAD or node.id in self._stateless)
                and len(node.children) == self._gone_children.get(node.id, 0))


def choose(order: Recency, bytes_wanted: int, *, page_bytes: int, slot_bytes: int,
           spared: Container[NodeId] = (), limit: int = EVICTIONS_PER_STEP) -> list[Eviction]:
    """Evictions that free at least ``bytes_wanted``, in the order in which to carry them out, or as many
    as there are up to ``limit``. Nodes in ``spared`` are left alone. ``page_bytes`` 0: a model without
    attention, whose edges go by themselves with their checkpoints."""
    chosen: list[Eviction] = []
    overlay = _Overlay()
    left_bare: list[Node] = []
    bare, states = _others(order.bare, spared), _others(order.states, spared)

    def now_bare(node: Node) -> None:
        if page_bytes and overlay.bare(node) and node.id not in spared:
            left_bare.append(node)

    while bytes_wanted > 0 and len(chosen) < limit:
        node = left_bare.pop() if left_bare else next(bare, None)
        if node is not None:
            dropped = pages_to_drop(bytes_wanted, page_bytes, len(node.pages))
            bytes_wanted -= dropped * page_bytes
            kept = len(node.pages) - dropped
            chosen.append(Eviction(node.id, "kv", kept))
            if not kept:
                now_bare(overlay.remove(node))
            continue
        node = next(states, None)
        if node is None:
            break
        chosen.append(Eviction(node.id, "state"))
        bytes_wanted -= slot_bytes
        overlay.lose_state(node)
        if node.is_tail:
            bytes_wanted -= page_bytes
            now_bare(overlay.remove(node))
        else:
            now_bare(node)
    return chosen


def _others(nodes: OrderedDict[NodeId, Node], spared: Container[NodeId]) -> Iterator[Node]:
    return (node for node_id, node in nodes.items() if node_id not in spared)
