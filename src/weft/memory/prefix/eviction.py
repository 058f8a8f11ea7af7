"""Order of evictions from the prefix cache: how much is short, two orders, and a choice that is a pure function of
both.

    Room      what a transaction can hand out now:  holes in frames of a kind, and frames free for either kind
    Demand    what would fit if everything were packed tightly:
                  frames >= ceil(pages / pages per frame) + ceil(slots / slots per frame)

    class 0   bare KV         leaves that no snapshot and no lease needs         oldest first
    class 1   snapshots     all of them, inside the tree and on the path of      as the policy ranks
                              a lease too: the state alone goes, its KV stays      them (policy.py)

    demand --choose--> [trim a bare leaf] ... [compress] ... [evict a snapshot, then its bare KV] ...

If the demand is met and the room is not, free space is scattered, and items move (relief.py). If the demand is not met,
cached data is evicted until it is, wherever the data is. So bytes of the wrong kind are never evicted for nothing, and
eviction knows no frames.

Bare KV goes first, whatever is short: in a model with states nothing resumes from it. A leaf is cut from its end. A
lease holds KV, never a snapshot: it copied the state when it opened. So any snapshot can go at any moment. A sequence
that runs without others can have all of the arena except the KV that it reads itself (law L3).

**Compressed states.** A snapshot that no sequence computes on may be rounded. Its int8 codes, with a scale for each
row, take about a quarter of its bytes and are stored in k KV pages, anywhere, in order. It saves the same seconds for
fewer bytes, so compression comes between the two classes, the least recently used state first. A compression takes
pages before it gives a slot back, and is done only if the demand in frames falls, so a shortage ends. A compressed
state stays compressed until its eviction: a sequence that resumes there gets a decoded copy in its own slot.

``choose`` changes nothing. It follows its own choices (a parent that becomes bare, KV of a chosen snapshot)
in an overlay, and stops at ``EVICTIONS_PER_STEP`` (law L11).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from weft.memory.frames.arena import FrameWalk, Walk
from weft.memory.prefix.compressed_kv import KvCompression
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.values import Eviction, FrameClaim, FrameKind, NodeId
from weft.units import PAD, PageId, ceil_div

SLOTS_AHEAD_MIN = 2
"""Slots ahead of need in any arena. A snapshot leaves a free slot for the next sequence (``Transaction.save``), so with
one slot ahead no snapshot would be taken once the arena is full, and a prompt shared by requests that end differently
would be computed for each of them."""
SLOTS_AHEAD_MAX = 24
SLOTS_AHEAD_SHARE = 64
"""Inverse share of the slots that are kept free ahead of need."""


def slots_ahead(slot_count: int) -> int:
    """Return the slots to keep free of ``slot_count``. A snapshot without a free slot is skipped; a step may want
    several."""
    return min(SLOTS_AHEAD_MAX, max(SLOTS_AHEAD_MIN, ceil_div(slot_count, SLOTS_AHEAD_SHARE)))


@dataclass(frozen=True, slots=True)
class Room:
    """Room of a transaction: holes in frames in use, free frames, and items per frame. A kind with 0 per frame does not
    exist in the model and is never short."""

    pages: int
    slots: int
    frames: int
    pages_per_frame: int
    slots_per_frame: int

    def short(self, pages: int, slots: int) -> tuple[int, int]:
        """Return how many of ``pages`` and ``slots`` cannot be given, if the slots are given first."""
        frames = self.frames
        slots_short = pages_short = 0
        if self.slots_per_frame:
            more = max(0, slots - self.slots)
            claimed = min(frames, ceil_div(more, self.slots_per_frame))
            slots_short = max(0, more - claimed * self.slots_per_frame)
            frames -= claimed
        if self.pages_per_frame:
            pages_short = max(0, pages - self.pages - frames * self.pages_per_frame)
        return pages_short, slots_short

    def frames_to_empty(self, pages: int, slots: int) -> tuple[int, int]:
        """Return the frames of pages and frames of slots to empty by moves, so that ``pages`` and ``slots`` can be
        given; limited by the holes to spare."""
        if not self.pages_per_frame or not self.slots_per_frame:
            return 0, 0
        pages_short, slots_short = self.short(pages, slots)
        of_pages = min(ceil_div(slots_short, self.slots_per_frame), max(0, self.pages - pages) // self.pages_per_frame)
        of_slots = min(ceil_div(pages_short, self.pages_per_frame), max(0, self.slots - slots) // self.slots_per_frame)
        return of_pages, of_slots


@dataclass(frozen=True, slots=True)
class Demand:
    """A demand on ``frames``: ``pages`` and ``slots`` are held or wanted and have to fit into them."""

    frames: int
    pages_per_frame: int
    slots_per_frame: int
    pages: int
    slots: int

    def met(self, pages_freed: int = 0, slots_freed: int = 0) -> bool:
        """Return whether they fit once ``pages_freed`` and ``slots_freed`` are free."""
        return self.frames_needed(pages_freed, slots_freed) <= self.frames

    def frames_needed(self, pages_freed: int, slots_freed: int) -> int:
        """Return the frames that they need once ``pages_freed`` and ``slots_freed`` are free. Negative arguments are
        extra demand."""
        frames = self._frames_of_slots(slots_freed)
        if self.pages_per_frame:
            frames += ceil_div(max(0, self.pages - pages_freed), self.pages_per_frame)
        return frames

    def pages_missing(self, pages_freed: int, slots_freed: int) -> int:
        """Return the further pages that have to go, if no more slots do."""
        room = (self.frames - self._frames_of_slots(slots_freed)) * self.pages_per_frame
        return max(0, self.pages - pages_freed - room)

    def slots_to_a_frame(self, slots_freed: int) -> int:
        """Return the further slots that have to go until the slots need one frame less."""
        per_frame = self.slots_per_frame
        return max(1, self.slots - slots_freed) % per_frame or per_frame if per_frame else 1

    def _frames_of_slots(self, slots_freed: int) -> int:
        return ceil_div(max(0, self.slots - slots_freed), self.slots_per_frame) if self.slots_per_frame else 0


UNMEETABLE = Demand(frames=-(2**60), pages_per_frame=1, slots_per_frame=1, pages=0, slots=0)
"""Demand that no eviction meets."""

COMPRESS_BYTES_PER_STEP = 256 << 20
"""Most bytes of slots that a step compresses, some 0.1 ms on a device that reads 3 TB a second. One state of any size
is compressed."""


class CompressedStates:
    """The pages of the compressed states of the tree, by node, in order."""

    __slots__ = ("page_count", "pages")

    def __init__(self) -> None:
        self.pages: dict[NodeId, list[PageId]] = {}
        self.page_count = 0

    def __len__(self) -> int:
        return len(self.pages)

    def enter(self, node: Node, pages: Iterable[PageId]) -> None:
        assert node.id not in self.pages, f"node {node.id} is compressed"
        self.pages[node.id] = list(pages)
        self.page_count += len(self.pages[node.id])

    def leave(self, node: Node) -> list[PageId]:
        pages = self.pages.pop(node.id)
        self.page_count -= len(pages)
        return pages


@dataclass(frozen=True, slots=True)
class CompressionRoom:
    """Room for compression: a transaction may compress ``at_once`` states, into ``pages_each`` pages each."""

    pages_each: int
    at_once: int

    def choose(
        self, candidates: Iterable[Node], spared: Container[NodeId], demand: Demand, pages: int, slots: int
    ) -> list[Node]:
        """Return the first of ``candidates``: the number that meets ``demand`` when ``pages`` and ``slots`` are free as
        well. If no number does, the number that leaves the least demand; none if none reduces it."""
        nodes = list(islice((node for node in candidates if node.id not in spared), max(0, self.at_once)))
        least, best = demand.frames_needed(pages, slots), 0
        for count in range(1, len(nodes) + 1):
            needed = demand.frames_needed(pages - count * self.pages_each, slots + count)
            if needed < least:
                least, best = needed, count
            if needed <= demand.frames:
                break
        return nodes[:best]


def pages_beyond(walk: Walk[PageId], frames: FrameWalk, count: int) -> tuple[list[PageId], list[FrameClaim]]:
    """Return the ``count`` pages that ``walk`` would give next, and the frames of ``frames`` that it would claim for
    them; takes neither. The caller has checked ``walk.room``."""
    pages = list(islice(walk.ahead(), count))
    beyond = frames.fork()
    while len(pages) < count:
        frame = beyond.claim(FrameKind.PAGES)
        pages += islice(reversed(walk.items_of(frame)), count - len(pages))
    return pages, beyond.claims


EVICTIONS_PER_STEP = 64
"""Most nodes that one reservation may cut or remove, or whose snapshot it may evict."""
NO_COMPRESSION = CompressionRoom(0, 0)
NO_KV_COMPRESSION = KvCompression(None)


class Recency:
    """The two classes, oldest first; every change is O(1). Only a commit changes them. ``in_slots``: the snapshots that
    are not compressed."""

    __slots__ = ("bare", "in_slots", "states")

    def __init__(self) -> None:
        self.bare: OrderedDict[NodeId, Node] = OrderedDict()
        self.states: OrderedDict[NodeId, Node] = OrderedDict()
        self.in_slots: OrderedDict[NodeId, Node] = OrderedDict()

    def refresh(self, node: Node, *, newest: bool) -> None:
        """Put ``node`` into the classes it belongs to now. A node that just became bare enters as the
        ``newest``; as the oldest if its snapshot or children were evicted."""
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
        """Note a use of the snapshot of ``node``."""
        self.states.move_to_end(node.id)
        if node.id in self.in_slots:
            self.in_slots.move_to_end(node.id)

    def forget(self, node: Node) -> None:
        """Forget ``node``, which was removed."""
        for nodes in (self.bare, self.states, self.in_slots):
            nodes.pop(node.id, None)


class _Overlay:
    """A view of the tree after the evictions chosen so far."""

    __slots__ = ("_removed_children", "_stateless")

    def __init__(self) -> None:
        self._removed_children: dict[NodeId, int] = {}
        self._stateless: set[NodeId] = set()

    def lose_state(self, node: Node) -> None:
        self._stateless.add(node.id)

    def remove(self, node: Node) -> Node:
        """Remove ``node``; return its parent."""
        assert node.parent is not None
        self._removed_children[node.parent.id] = self._removed_children.get(node.parent.id, 0) + 1
        return node.parent

    def bare(self, node: Node) -> bool:
        return (node.slot == PAD or node.id in self._stateless) and self.leaf(node)

    def leaf(self, node: Node) -> bool:
        """Return whether only its own snapshot needs the KV of ``node``."""
        return (
            node.parent is not None and not node.holds and len(node.children) == self._removed_children.get(node.id, 0)
        )


def choose(
    order: Recency,
    demand: Demand,
    *,
    ranked: Iterable[Node] = (),
    spared: Container[NodeId] = (),
    last: Sequence[NodeId] = (),
    limit: int = EVICTIONS_PER_STEP,
    compression: CompressionRoom = NO_COMPRESSION,
    kv_compression: KvCompression = NO_KV_COMPRESSION,
) -> list[Eviction]:
    """Return evictions that meet ``demand``, in the order in which to carry them out; fewer if ``limit`` ends them.
    Snapshots go in the order ``ranked``, and those it leaves out by recency. Nodes in ``spared`` stay. Those of
    ``last`` go after all others, the first of them at the very end. In a model without attention, nodes go with their
    snapshots."""
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
        # Nodes that this choice compresses stay until the next transaction: the step writes their pages.
        stays = node.id in spared or node.id in late or node.id in kv_compression.chosen
        if node.page_count and overlay.bare(node) and not stays:
            newly_bare.append(node)

    while len(chosen) < limit and not demand.met(pages, slots):
        node = newly_bare.pop() if newly_bare else next(bare, None)
        if node is not None:
            page_count = kv_compression.pages_of(node)
            dropped = (
                page_count
                if kv_compression.is_compressed(node)
                else min(page_count, demand.pages_missing(pages, slots))
            )
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
    """Snapshots in order, except that a leaf precedes the others among the next few."""

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
        leaves = (index for index, node in enumerate(self._seen[:few]) if node.page_count and self._is_leaf(node))
        return self._seen.pop(next(leaves, 0)) if self._seen else None


def _in_turn(ranked: Iterable[Node], states: OrderedDict[NodeId, Node], *left_out: Container[NodeId]) -> Iterator[Node]:
    """Yield every snapshot once, the ranked ones first. A ranked node without a snapshot is skipped."""
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
