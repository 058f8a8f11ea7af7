"""Lookups in the prefix tree: how far tokens match, and which checkpoint lies deepest on the path.

    find   root, tokens of a prompt   -->  PrefixMatch: where KV ends, the anchor, what was evicted
    walk   node, tokens that follow   -->  TreePath: the nodes passed, the node partly matched, the end

        root --[ a a a a )--[ b b b b )--[ c c c c )
                          ^ anchor     |
        prompt  a a a a b b b b c c x x                KV matches two tokens into c; it resumes at the anchor

A walk compares the bytes of an edge, not its nodes (edge.py): 100,000 cached tokens are matched in about 40
microseconds. ``find`` then climbs from the deepest node to the first one with a checkpoint (law L8). It also
tries the tails on the way, longest first.

Pure readings: nothing here changes a node.

Laws: L8 (a hit is a checkpoint), L10 (tokens are compared, never hashes).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.memory.prefix.edge import PAGE_KEY_BYTES, TOKEN_BYTES, Node
from weft.units import PAD, PageId


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Where a lookup ended.

    ``node``: the deepest node that matches whole; ``partly``: its child that matches further in part.
    ``kv_tokens``: how far the KV matches, that part included. ``anchor``: the deepest node on the path with a
    checkpoint. ``state_lost_at``: the deepest position beyond the anchor where a checkpoint was evicted, 0
    without one. ``kv_lost_tokens``: tokens beyond ``kv_tokens`` that were evicted; an upper bound."""

    node: Node
    partly: Node | None
    kv_tokens: int
    anchor: Node | None
    state_lost_at: int
    kv_lost_tokens: int


@dataclass(frozen=True, slots=True)
class TreePath:
    """A walk below a node, whole pages only. ``passed``: the nodes that match whole, in order. ``partly``:
    the child in which the walk ended, None at a node. ``end``: the position."""

    passed: tuple[Node, ...]
    partly: Node | None
    end: int


def find(root: Node, data: bytes) -> PrefixMatch:
    """The deepest match of the tokens ``data`` (int32 bytes) below ``root``."""
    path = walk(root, data)
    node = deepest = path.passed[-1] if path.passed else root
    anchor, lost = None, 0
    at: Node | None = node
    while at is not None:
        anchor = _tail_along(at, data) or (at if at.slot != PAD else None)
        if anchor is not None:
            break
        if at.state_lost and not lost:
            lost = at.end
        at = at.parent
    position = anchor.end if anchor is not None else 0
    key = data[path.end * TOKEN_BYTES:path.end * TOKEN_BYTES + PAGE_KEY_BYTES]
    evicted = deepest.ghosts.get(key, 0) if path.partly is None else 0
    kv_lost = min(evicted, len(data) // TOKEN_BYTES - path.end)
    lost = lost if lost > position else 0
    return PrefixMatch(deepest, path.partly, max(path.end, position), anchor, lost, kv_lost)


def _tail_along(node: Node, data: bytes) -> Node | None:
    """The longest tail below ``node`` whose tokens ``data`` has."""
    if not node.tail_count:
        return None
    first = node.end * TOKEN_BYTES
    longest = min(len(data) - first, PAGE_KEY_BYTES - TOKEN_BYTES)
    for length in range(longest, 0, -TOKEN_BYTES):
        tail = node.children.get(data[first:first + length])
        if tail is not None:
            return tail
    return None


def walk(node: Node, data: bytes, first: int = 0) -> TreePath:
    """Follow ``data``, whose tokens begin at position ``first``, down from the end of ``node``."""
    passed: list[Node] = []
    at = (node.end - first) * TOKEN_BYTES
    while at + PAGE_KEY_BYTES <= len(data):
        child = node.children.get(data[at:at + PAGE_KEY_BYTES])
        if child is None:
            break
        edge = child.edge
        reached = edge.matches_until(child.start, data, at)
        passed += edge.nodes_passed(edge.index_of(child), reached)
        if not passed or passed[-1].end < reached:
            return TreePath(tuple(passed), edge.node_at(reached - 1), reached)
        node = passed[-1]
        at = (reached - first) * TOKEN_BYTES
    return TreePath(tuple(passed), None, first + at // TOKEN_BYTES)


def path_pages(node: Node, first: int, end: int) -> list[PageId]:
    """Pages of the tokens [first, end) on the path to ``node``, whose span reaches ``end``; both are
    multiples of a page. Empty in a model without attention."""
    pieces: list[list[PageId]] = []
    at: Node | None = node
    while at is not None and at.edge.pages and at.end > first:
        edge = at.edge
        if edge.start < end:
            pieces.append(edge.pages_between(max(first, edge.start), min(end, at.end)))
        at = edge.nodes[0].parent
    return [page for piece in reversed(pieces) for page in piece]


