"""The effects of one transaction's publications, computed before the commit without a change.

Two sequences with the same tokens may publish in one step, before either is in the tree. Each path that a
transaction will add is remembered by the place where it leaves the tree. So the second sequence sees the
first one's pages as if they were the tree's. The reservation says exactly which pages the tree adopts and
which ones a sequence frees:

    tree       [0..512)
    A adds              [512..1024)  pages of A               remembered at (node, 512)
    B adds              [512..1024)  pages of A, [1024..) pages of B
                         B frees its own pages of [512..1024), its table is patched

Compressed KV in the tree (compressed_kv.py) has tokens and no pages. The first sequence that publishes over such an
edge gives the tree its own pages, and frees none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.memory.prefix.compressed_kv import Restoring
from weft.memory.prefix.edge import PAGE_KEY_BYTES, Node, common_pages, path_pages, walk
from weft.memory.prefix.tree import PrefixTree
from weft.memory.reservation import Lease, Publication, TablePatch
from weft.memory.values import NO_NODE, NodeId, Snapshot
from weft.units import PAGE_TOKENS, PageId


@dataclass(frozen=True, slots=True)
class _Path:
    """A path of tokens (int32 bytes, complete pages) that will follow a place in the tree, and their pages."""

    tokens: bytes
    pages: list[PageId]


class Sharing:
    """The publications of one transaction."""

    __slots__ = ("_paths", "_restoring", "_tree", "freed_count", "patches", "publications", "visited")

    def __init__(self, tree: PrefixTree, restoring: Restoring) -> None:
        self._tree = tree
        self._restoring = restoring
        self._paths: dict[tuple[str, NodeId, int], list[_Path]] = {}
        self.publications: list[Publication] = []
        self.patches: list[TablePatch] = []
        self.visited: set[NodeId] = set()
        """Nodes on the path of a publication: this transaction must not evict them."""
        self.freed_count = 0
        """Pages that sequences free because they adopt the tree's."""

    def add(self, lease: Lease, tokens: bytes, saves: tuple[Snapshot, ...], *, patch: bool) -> None:
        """Add the ``tokens`` of ``lease`` after its shared ones. ``patch``: the sequence continues."""
        start = lease.shared_tokens
        whole = tokens[: len(tokens) // PAGE_KEY_BYTES * PAGE_KEY_BYTES]
        pages, cached_end = self._resolve(lease, start, whole)
        self.publications.append(Publication(lease.seq, start, tokens, tuple(pages), cached_end, saves))
        first = start // PAGE_TOKENS
        own = lease.pages[first : first + len(pages)]
        changed = [index for index, (mine, shared) in enumerate(zip(own, pages, strict=True)) if mine != shared]
        self.freed_count += len(changed)
        if patch and changed:
            self.patches += [
                TablePatch(lease.seq, first + run.start, tuple(pages[run.start : run.stop])) for run in _runs(changed)
            ]

    def _resolve(self, lease: Lease, start: int, whole: bytes) -> tuple[list[PageId], int]:
        """Return the pages of ``whole`` once it is in the tree, and the position up to which it is cached before."""
        tree, paged = self._tree, self._tree.paged
        base = tree.by_id[lease.shared_node] if lease.shared_node != NO_NODE else tree.roots.get(lease.salt)
        pages: list[PageId] = []
        end, place = start, NO_NODE
        if base is not None:
            path = walk(base, whole, start)
            last: Node = path.partly or (path.passed[-1] if path.passed else base)
            self.visited.update(node.id for node in path.passed)
            self.visited.add(last.id)
            first = start // PAGE_TOKENS
            cached, own = path_pages(last, start, path.end), lease.pages[first : path.end // PAGE_TOKENS]
            if paged and not lease.inexact:
                for node in (*path.passed, path.partly) if path.partly is not None else path.passed:
                    begin = node.start // PAGE_TOKENS - first
                    end = min(node.end, path.end) // PAGE_TOKENS - first
                    self._restoring.replace_inexact(node, cached[begin:end], own[begin:end])
            pages = self._restoring.resolve_over(cached, own)
            end, place = path.end, last.id
        rest = whole[(end - start) // PAGE_TOKENS * PAGE_KEY_BYTES :]
        earlier = self._paths.setdefault((lease.salt, place, end), [])
        longest, shared = None, 0
        for other in earlier:
            common = common_pages(other.tokens, rest)
            if common > shared:
                longest, shared = other, common
        first = end // PAGE_TOKENS
        beyond: list[PageId] = []
        if paged:
            beyond = longest.pages[:shared] if longest is not None else []
            beyond = beyond + lease.pages[first + shared : first + len(rest) // PAGE_KEY_BYTES]
        earlier.append(_Path(rest, beyond))
        return pages + beyond, end + shared * PAGE_TOKENS


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    """Yield ascending ``numbers`` as ranges of consecutive ones."""
    first = last = None
    for number in numbers:
        if first is None or last is None or number != last + 1:
            if first is not None and last is not None:
                yield range(first, last + 1)
            first = number
        last = number
    if first is not None and last is not None:
        yield range(first, last + 1)
