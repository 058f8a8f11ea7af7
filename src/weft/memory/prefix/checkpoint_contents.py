"""A checkpoint as a store sees it: its tokens, the pages of its KV and its slot.

    root --[ pages 3 9 4 )--[ pages 7 2 )o slot 5        tokens [0, position), pages 3 9 4 7 2, slot 5

Pure readings of the tree. Pages and slot are those of the books at this version: a caller names them in the
plan of the same version, and looks again for the next one. Compressed KV has no pages of its own, and a
compressed state no slot. Neither has a stored form.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft.memory.prefix.cache import PrefixCache
from weft.memory.prefix.edge import Node
from weft.memory.prefix.lookup import path_pages
from weft.memory.prefix.tree import namespace_of
from weft.memory.values import NO_SLOT, NodeId
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """``tokens``: int32 [position]. ``pages``: KV of [``start``, position). ``slot``: NO_SLOT in a model
    without recurrent layers. ``exact``: no part of it was ever compressed. ``above``: the position of the
    next checkpoint above, 0 without one. ``hits``: sequences that resumed at it."""

    node: NodeId
    salt: str
    tokens: npt.NDArray[np.int32] = field(repr=False)
    start: int
    pages: tuple[PageId, ...] = field(repr=False)
    slot: SlotId
    exact: bool
    above: int
    hits: int

    @property
    def position(self) -> int:
        return int(self.tokens.size)


def checkpoint_contents(cache: PrefixCache, name: NodeId, start: int = 0) -> CheckpointContents | None:
    """The checkpoint of the node ``name``, with its pages from position ``start`` on, a multiple of a page.
    None if the node or its checkpoint is gone, or if a part of it is compressed."""
    node = cache.tree.by_id.get(name)
    if node is None or node.parent is None or (cache.stateful and node.slot < 0):
        return None
    pages = _pages(node, start)
    if any(page < 0 for page in pages):
        return None
    exact, above = not (cache.stateful and node.state_inexact), 0
    at: Node | None = node
    while at is not None:
        exact &= not at.kv_inexact
        at = at.parent
        if at is not None and at.slot != PAD and not above:
            above = at.end
    slot, salt = node.slot if cache.stateful else NO_SLOT, namespace_of(cache.tree, node)
    return CheckpointContents(node.id, salt, _tokens(node), start, tuple(pages), slot, exact, above,
                              node.hits)


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
