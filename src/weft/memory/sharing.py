"""What publishing will do, worked out before it is done: a reading of the tree and of the same draft.

Two sequences with the same tokens may publish in one step, before either is in the tree. Each path that a
draft will add is remembered by where it leaves the tree, so that the second finds the first's pages as it
would find the tree's, and the reservation says exactly which page is kept and which is given up:

    tree       [0..512)
    A adds              [512..1024)  pages of A               remembered at (node, 512)
    B adds              [512..1024)  pages of A, [1024..) pages of B
                         B's own pages of [512..1024) fall out, its table is patched
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.memory.lease import Checkpoint, Lease
from weft.memory.reservation import Publication, TablePatch
from weft.memory.strand import PAGE_KEY_BYTES, common_pages
from weft.memory.tree import NO_NODE, Node, NodeId, PrefixTree
from weft.units import PAGE_TOKENS, PageId


@dataclass(frozen=True, slots=True)
class _Path:
    """Tokens (int32 bytes, whole pages) that will follow a place in the tree, and their pages."""

    tokens: bytes
    pages: list[PageId]


class Sharing:
    """The publications of one draft."""

    __slots__ = ("_paths", "_tree", "patches", "publications", "visited")

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._paths: dict[tuple[str, NodeId, int], list[_Path]] = {}
        self.publications: list[Publication] = []
        self.patches: list[TablePatch] = []
        self.visited: set[NodeId] = set()
        """Nodes on the way of a publication: not to be evicted in the same draft."""

    def add(self, lease: Lease, tokens: bytes, saves: tuple[Checkpoint, ...], *, patch: bool) -> None:
        """``tokens`` are those of ``lease`` after its shared ones. ``patch``: the sequence goes on."""
        start = lease.shared_tokens
        whole = tokens[:len(tokens) // PAGE_KEY_BYTES * PAGE_KEY_BYTES]
        pages, there = self._resolve(lease, start, whole)
        self.publications.append(Publication(lease.seq, start, tokens, tuple(pages), there, saves))
        if not patch:
            return
        first = start // PAGE_TOKENS
        own = lease.pages[first:first + len(pages)]
        changed = sum(1 for mine, kept in zip(own, pages, strict=True) if mine != kept)
        if changed:
            assert own[changed:] == pages[changed:], "the pages that are given up come first"
            self.patches.append(TablePatch(lease.seq, first, tuple(pages[:changed])))

    def _resolve(self, lease: Lease, start: int, whole: bytes) -> tuple[list[PageId], int]:
        """Pages of ``whole`` once it is in the tree, and up to which position it is there before."""
        tree, paged = self._tree, self._tree.paged
        base = tree.by_id[lease.held] if lease.held != NO_NODE else tree.roots.get(lease.salt)
        pages: list[PageId] = []
        end, place = start, NO_NODE
        if base is not None:
            way = tree.walk(base, whole, start)
            last: Node = way.partly or (way.passed[-1] if way.passed else base)
            self.visited.update(node.id for node in way.passed)
            self.visited.add(last.id)
            pages, end, place = tree.path_pages(last, start, way.end), way.end, last.id
        rest = whole[(end - start) // PAGE_TOKENS * PAGE_KEY_BYTES:]
        earlier = self._paths.setdefault((lease.salt, place, end), [])
        longest, shared = None, 0
        for path in earlier:
            common = common_pages(path.tokens, rest)
            if common > shared:
                longest, shared = path, common
        first = end // PAGE_TOKENS
        beyond: list[PageId] = []
        if paged:
            beyond = longest.pages[:shared] if longest is not None else []
            beyond = beyond + lease.pages[first + shared:first + len(rest) // PAGE_KEY_BYTES]
        earlier.append(_Path(rest, beyond))
        return pages + beyond, end + shared * PAGE_TOKENS
