"""Compressed states: checkpoints in 8 bits, some quarter of their bytes, in KV pages.

    slot     [ float32 state of all recurrent layers                    ]      S' bytes
                    | state_compressions (int8 codes, a scale for each row)   ^ state_restores, when somebody begins there
    pages    [ 17 ][ 4 ][ 90 ] ... [ 33 ]                               k pages, anywhere, in order

A state that is only kept, and that nobody computes on, need not have its last bits. Bytes come in pages here,
so a compressed state is k pages (``ArenaPlan.compressed_pages``): no third kind of frame, no remainder of a frame
that is too small for one more, nothing new to zero, and compaction moves its pages like any others. Where
there are no pages, or a state is windows and no accumulators, nothing is ever compressed (``compressed_pages`` 0).

**When.** The currency is seconds saved per byte (policy.py). Compressed or not, a state saves the same seconds,
but for the microseconds in which it is made wide again. So what compression gives up for the bytes it frees is
next to nothing, and less than what any eviction gives up: when memory is short, KV without use goes, then
states are compressed, and what is still missing is evicted, in the order of worth with the bytes that a state has
compressed. As bytes and microseconds are the same for every state of a model, all that the currency says about
whom to compress is how soon it will be used: least recently used first.

Compression takes pages before it gives a slot back, so pages for one more are kept free (``Draft._wanted``). It
must make the demand smaller in frames, or it is not done: so a shortage ends (law L3). At most
COMPRESS_BYTES_PER_STEP are read for it in a step (law L11).

A state that is compressed stays so until it goes: whoever begins there gets a wide copy of its own, and a wide
one beside it would only save microseconds again.

Laws: L1 (a page of a compressed state is its node's, and is audited), L5 (a slot that is left has a new epoch),
L7.

Rejected: frames of compressed states, as a third kind (three of 3.7 fit into a frame of one slot: 19 % is lost);
compression at once instead of when memory is short (a cache with room to spare would lose bits for nothing);
compression over several steps instead of evicting anything (who waits is admitted as soon as it fits, and finds
no slot left to keep its states in: worse at every size that was tried).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import islice

from weft.memory.frames.arena import FrameWalk
from weft.memory.frames.packing import Walk
from weft.memory.frames.pressure import Demand
from weft.memory.prefix.tree import Node
from weft.memory.values import FrameClaim, FrameKind, NodeId
from weft.units import PageId

COMPRESS_BYTES_PER_STEP = 256 << 20
"""Of slots: some 0.1 ms on a device that reads 3 TB a second. One is compressed however large it is."""


class CompressedStates:
    """Which pages have the compressed states of the tree, by node, in order."""

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
    """``at_once`` states may be compressed by a draft, in ``pages_each`` pages each."""

    pages_each: int
    at_once: int

    def choose(self, candidates: Iterable[Node], spared: Container[NodeId], demand: Demand, pages: int,
               slots: int) -> list[Node]:
        """Of ``candidates``, in order, as many as it takes to meet ``demand`` when so many ``pages`` and
        ``slots`` are free besides; if no number does, that which leaves least; none if none makes it
        smaller."""
        nodes = list(islice((node for node in candidates if node.id not in spared), max(0, self.at_once)))
        least, best = demand.frames_taken(pages, slots), 0
        for count in range(1, len(nodes) + 1):
            taken = demand.frames_taken(pages - count * self.pages_each, slots + count)
            if taken < least:
                least, best = taken, count
            if taken <= demand.frames:
                break
        return nodes[:best]


def pages_beyond(walk: Walk[PageId], frames: FrameWalk, count: int) -> tuple[list[PageId], list[FrameClaim]]:
    """The ``count`` pages that ``walk`` would give next, and the frames of ``frames`` that it would claim for
    them; takes neither. The caller has seen that ``walk.room`` is enough."""
    pages = list(islice(walk.ahead(), count))
    beyond = frames.fork()
    while len(pages) < count:
        frame = beyond.claim(FrameKind.PAGES)
        pages += islice(reversed(walk.items_of(frame)), count - len(pages))
    return pages, beyond.claims
