"""Compressed states: checkpoints in 8 bits, about a quarter of their bytes, in KV pages.

    slot     [ float32 state of all recurrent layers                    ]      S' bytes
                    | compress (int8 codes, a scale for each row)    ^ restore, when a sequence resumes there
    pages    [ 17 ][ 4 ][ 90 ] ... [ 33 ]                               k pages, anywhere, in order

A checkpoint that no sequence computes on does not need its last bits. The arena hands out pages, so a
compressed state is k pages (``ArenaPlan.compressed_pages``). There is no third kind of frame, no remainder of
a frame too small for one more state, and nothing new to zero. Compaction moves these pages like any others. A
model without pages, or with states that are windows and no accumulators, compresses none
(``compressed_pages`` 0).

**When.** The currency is seconds saved per byte (policy.py). A compressed state saves the same seconds, less
the microseconds of a restore. So compression gives up next to nothing for the bytes that it frees, less than
any eviction. When memory is short, bare KV goes first, then states are compressed. What is still missing is
evicted in the order of the policy, which values a state by its compressed bytes. Bytes and microseconds are
the same for all states of a model, so only the time of the next use matters: the least recently used goes
first.

Compression takes pages before it gives a slot back, so the pages of one more state stay free (``Relief``). It
must reduce the demand in frames, or it is not done; so a shortage ends (law L3). A step reads at most
COMPRESS_BYTES_PER_STEP for it (law L11).

A compressed state stays compressed until its eviction. A sequence that resumes there gets an unpacked copy in
its own slot. A second copy for the cache would save only microseconds.

Laws: L1 (a page of a compressed state belongs to its node; audited), L5 (a slot that is left gets a new
epoch), L7.

Rejected: frames of compressed states as a third kind (three of 3.7 fit into a frame of one slot: 19 % is
lost); compression at once, not under pressure (a cache with room would lose bits for nothing); compression
over several steps before any eviction (a waiting request is admitted once it fits, and finds no free slot for
its checkpoints: worse at every size tried).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import islice

from weft.memory.frames.arena import FrameWalk
from weft.memory.frames.packing import Walk
from weft.memory.frames.pressure import Demand
from weft.memory.prefix.edge import Node
from weft.memory.values import FrameClaim, FrameKind, NodeId
from weft.units import PageId

COMPRESS_BYTES_PER_STEP = 256 << 20
"""Bytes of slots, some 0.1 ms on a device that reads 3 TB a second. One state of any size is compressed."""


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
    """A draft may compress ``at_once`` states, into ``pages_each`` pages each."""

    pages_each: int
    at_once: int

    def choose(self, candidates: Iterable[Node], spared: Container[NodeId], demand: Demand, pages: int,
               slots: int) -> list[Node]:
        """The first of ``candidates``, as many as meet ``demand`` when ``pages`` and ``slots`` are free
        besides. If no number does, the number that leaves the least demand; none if none reduces it."""
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
    """The ``count`` pages that ``walk`` would give next, and the frames of ``frames`` that it would claim for
    them; takes neither. The caller has checked ``walk.room``."""
    pages = list(islice(walk.ahead(), count))
    beyond = frames.fork()
    while len(pages) < count:
        frame = beyond.claim(FrameKind.PAGES)
        pages += islice(reversed(walk.items_of(frame)), count - len(pages))
    return pages, beyond.claims
