"""A edge: the tokens and pages of one edge of the prefix tree as it came, however it was cut since.

    edge   tokens  [ t0 ........................................ ]    int32 bytes, one piece
             pages   [ p0 p1 p2 p3 p4 p5 p6 p7 ]
             nodes   |-- a --|---- b ----|- c --|                       each the parent of the next

A checkpoint inside an edge cuts it: the edge becomes two nodes. A long prompt that keeps its state every 64
tokens is cut a thousand times, and looking it up node by node would cost a thousand dictionary lookups. So
nodes are positions on a edge: cutting copies nothing, the pages of a way down it are one slice, and one
comparison of bytes goes past all of its nodes at once.

A edge is also what a page remembers as its owner: cuts do not change it, so finding the node of a page is
a bisection and never a scan (compaction asks).

A edge loses nodes only from its end, as only leaves go. ``tokens`` may be longer than the nodes: it is cut
when less than half of it is in use, so that a chain which is evicted node by node is not copied each time.

Rejected: merging nodes that have no checkpoint any more (a second place that changes edges, for dead weight
that eviction removes anyway); comparing through to the end of a edge at once (a walk that leaves each of
many edges early would pay for all of them: windows grow with what has matched).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NewType

import numpy as np

from weft.units import PAD, PAGE_TOKENS, PageId

if TYPE_CHECKING:
    from weft.memory.prefix.tree import Node

EdgeId = NewType("EdgeId", int)

TOKEN_BYTES = 4
PAGE_KEY_BYTES = PAGE_TOKENS * TOKEN_BYTES
_WINDOW_BYTES = 64 * PAGE_KEY_BYTES

_end_of = attrgetter("end")
_start_of = attrgetter("start")


@dataclass(eq=False, slots=True)
class Edge:
    """``start``: the token position where it begins, a multiple of a page. ``pages`` is empty in a model
    without attention; what is compressed has names in place of pages (packed_kv.py)."""

    id: EdgeId
    start: int
    tokens: bytes = field(repr=False)
    pages: list[PageId] = field(repr=False)
    nodes: list[Node] = field(default_factory=list, repr=False)

    def tokens_between(self, start: int, end: int) -> bytes:
        return self.tokens[(start - self.start) * TOKEN_BYTES:(end - self.start) * TOKEN_BYTES]

    def pages_between(self, start: int, end: int) -> list[PageId]:
        """Pages of the tokens [start, end): the last one may be filled in part only."""
        if not self.pages:
            return []
        return self.pages[(start - self.start) // PAGE_TOKENS:-((self.start - end) // PAGE_TOKENS)]

    def put(self, start: int, pages: Sequence[PageId]) -> None:
        """The tokens from ``start`` on, a multiple of a page, are on ``pages`` from now on."""
        first = (start - self.start) // PAGE_TOKENS
        assert first + len(pages) <= len(self.pages)
        self.pages[first:first + len(pages)] = pages

    def index_of(self, node: Node) -> int:
        return bisect_left(self.nodes, node.start, key=_start_of)

    def node_at(self, position: int) -> Node:
        """The node whose edge has the token at ``position``."""
        return self.nodes[bisect_right(self.nodes, position, key=_end_of)]

    def nodes_passed(self, first: int, position: int) -> list[Node]:
        """Those from number ``first`` on that end at ``position`` or before."""
        return self.nodes[first:bisect_right(self.nodes, position, first, key=_end_of)]

    def matches_until(self, position: int, data: bytes, at: int) -> int:
        """How far the edge from ``position`` on has the tokens of ``data`` from byte ``at`` on: a position,
        whole pages only."""
        offset = (position - self.start) * TOKEN_BYTES
        length = min((self.nodes[-1].end - position) * TOKEN_BYTES, len(data) - at)
        length -= length % PAGE_KEY_BYTES
        done, window = 0, _WINDOW_BYTES
        while done < length:
            piece = self.tokens[offset + done:offset + min(done + window, length)]
            if not data.startswith(piece, at + done):
                done += common_pages(piece, data[at + done:at + done + len(piece)]) * PAGE_KEY_BYTES
                break
            done += len(piece)
            window *= 4
        return position + done // TOKEN_BYTES

    def cut_to(self, end: int) -> list[PageId]:
        """What lies beyond ``end`` goes, once its nodes have gone or were shortened; returns the pages."""
        kept = -((self.start - end) // PAGE_TOKENS)
        gone = self.pages[kept:]
        del self.pages[kept:]
        used = (end - self.start) * TOKEN_BYTES
        if 2 * used <= len(self.tokens):
            self.tokens = self.tokens[:used]
        return gone


NO_EDGE = EdgeId(PAD)


def common_pages(left: bytes, right: bytes) -> int:
    """Whole pages of tokens at the front of both that are equal."""
    length = min(len(left), len(right)) // PAGE_KEY_BYTES * PAGE_KEY_BYTES
    differ = np.frombuffer(left, np.int32, length // TOKEN_BYTES) != np.frombuffer(
        right, np.int32, length // TOKEN_BYTES)
    first = int(differ.argmax()) if length else 0
    return (first if length and differ[first] else length // TOKEN_BYTES) // PAGE_TOKENS
