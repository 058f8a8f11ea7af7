"""A checkpoint as a store sees it: its tokens, the pages of its KV and its slot.

    root --[ pages 3 9 4 )--[ packed 7 2 )o slot 5       tokens [0, position)
                                                         rows   3 9 4 exact | 7 2 in 8 bits
                                                         state  slot 5

Pure readings of the tree. Pages and slot are those of the books at this version: a caller names them in the
plan of the same version, and looks again for the next one.

Compressed KV is its packed pages, one row of a buffer each. Its codes lie side by side in those rows, from
``skip_bytes`` of the first row on. A compressed state is the pages that hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.memory.prefix.cache import PrefixCache
from weft.memory.prefix.edge import COMPRESSED, Node
from weft.memory.prefix.lookup import path_pages
from weft.memory.prefix.tree import namespace_of
from weft.memory.values import NO_SLOT, NodeId
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId, ceil_div, pages_for


class KvPart(NamedTuple):
    """KV of tokens [``start``, ``end``) in ``row_count`` pages. ``compressed``: codes, from ``skip_bytes`` of
    the first page on."""

    start: int
    end: int
    row_count: int
    compressed: bool = False
    skip_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """``tokens``: int32 [position]. ``pages``: those of all ``parts``, the KV of [``start``, position), and
    then those of a compressed state. ``slot``: NO_SLOT in a model without recurrent layers, COMPRESSED for a
    compressed state. ``exact``: no part of it was ever compressed. ``above``: the position of the next
    checkpoint above, 0 without one. ``hits``: sequences that resumed at it."""

    node: NodeId
    salt: str
    tokens: npt.NDArray[np.int32] = field(repr=False)
    start: int
    pages: tuple[PageId, ...] = field(repr=False)
    parts: tuple[KvPart, ...]
    slot: SlotId
    exact: bool
    above: int
    hits: int

    @property
    def position(self) -> int:
        return int(self.tokens.size)

    @property
    def has_compressed(self) -> bool:
        return self.slot == COMPRESSED or any(part.compressed for part in self.parts)

    @property
    def form(self) -> tuple[object, ...]:
        """What must stay the same while pages are copied in several steps."""
        return self.position, self.parts, self.slot == COMPRESSED


def checkpoint_contents(cache: PrefixCache, name: NodeId, start: int = 0) -> CheckpointContents | None:
    """The checkpoint of the node ``name``, with its pages from position ``start`` on, a multiple of a page.
    None if the node or its checkpoint is gone."""
    node = cache.tree.by_id.get(name)
    if node is None or node.parent is None or (cache.stateful and node.slot == PAD):
        return None
    parts, pages = _parts(cache, node, start)
    exact, above = not (cache.stateful and node.state_inexact), 0
    at: Node | None = node
    while at is not None:
        exact &= not at.kv_inexact
        at = at.parent
        if at is not None and at.slot != PAD and not above:
            above = at.end
    slot, salt = node.slot if cache.stateful else NO_SLOT, namespace_of(cache.tree, node)
    if slot == COMPRESSED:
        pages += cache.compressed_states.pages[node.id]
    return CheckpointContents(node.id, salt, _tokens(node), start, tuple(pages), tuple(parts), slot, exact,
                              above, node.hits)


def _parts(cache: PrefixCache, node: Node, start: int) -> tuple[list[KvPart], list[PageId]]:
    if not cache.tree.paged or start >= node.end:
        return [KvPart(start, node.end, 0)], []
    if not cache.compressed_kv.by_node:
        pages = _pages(node, start)
        return [KvPart(start, node.end, len(pages))], pages
    pieces: list[tuple[KvPart, list[PageId]]] = []
    at: Node | None = node
    while at is not None and at.parent is not None and at.end > start:
        pieces.append(_part(cache, at, max(start, at.start)))
        at = at.parent
    parts: list[KvPart] = []
    for part, _ in reversed(pieces):
        before = parts[-1] if parts else None
        if before is not None and not before.compressed and not part.compressed:
            parts[-1] = KvPart(before.start, part.end, before.row_count + part.row_count)
        else:
            parts.append(part)
    return parts, [page for _, pages in reversed(pieces) for page in pages]


def _part(cache: PrefixCache, node: Node, start: int) -> tuple[KvPart, list[PageId]]:
    """The KV of one node from ``start`` on."""
    packed = cache.compressed_kv.by_node.get(node.id)
    if packed is None:
        pages = node.pages[(start - node.start) // PAGE_TOKENS:]
        return KvPart(start, node.end, len(pages)), pages
    form = cache.compressed_kv.form
    passed = (start - node.start) // PAGE_TOKENS
    row, skip_bytes = divmod(packed.skip_bytes + passed * form.record_bytes, form.page_bytes)
    count = pages_for(node.end) - start // PAGE_TOKENS
    pages = packed.pages[row:row + ceil_div(skip_bytes + count * form.record_bytes, form.page_bytes)]
    return KvPart(start, node.end, len(pages), True, skip_bytes), pages


def _pages(node: Node, start: int) -> list[PageId]:
    if not node.is_tail:
        return path_pages(node, start, node.end)
    whole = node.end // PAGE_TOKENS * PAGE_TOKENS
    above = path_pages(node.parent, start, whole) if node.parent is not None and start < whole else []
    return [*above, *node.pages]


def _tokens(node: Node) -> npt.NDArray[np.int32]:
    pieces: list[bytes] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        edge = at.edge
        pieces.append(edge.tokens_between(edge.start, at.end))
        at = edge.nodes[0].parent
    return np.frombuffer(b"".join(reversed(pieces)), dtype=np.int32)
