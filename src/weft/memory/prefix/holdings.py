"""What a checkpoint of the prefix tree holds and saves: the bytes that only it makes useful, and where one
would begin without it. Pure readings of a few nodes.

    root --[ 0..512 )--+--[ 512..2048 )  state A     A alone holds its own edge: 96 pages; [0..512) is B's too
                       '--[ 512..1024 )--[ 1024..4096 )  state B

Two states that share all of their KV hold none of it *alone*: dropping either frees only the state, and so
the cheaper one to compute again goes, and then the other holds all of it.

At most STEPS_MAX nodes are looked at (law L11): a prompt that keeps its state every 64 tokens has a
thousand nodes, and whose bytes are those far above is of no weight there.
"""

from __future__ import annotations

from weft.memory.prefix.edge import TOKEN_BYTES
from weft.memory.prefix.tree import Node
from weft.units import PAD, PAGE_TOKENS

STEPS_MAX = 64


def kept_above(node: Node) -> Node | None:
    """The nearest checkpoint on the way to ``node``, its own left out: also a tail that its tokens go
    through. None: there is none near."""
    child = node
    for _ in range(STEPS_MAX):
        above = child.parent
        if above is None:
            return None
        tail = _tail_towards(above, child) if above.tail_count else None
        if tail is not None:
            return tail
        if above.slot != PAD:
            return above
        child = above
    return None


def kept_at_or_above(node: Node) -> Node | None:
    return node if node.slot != PAD else kept_above(node)


def kept_only_below(node: Node) -> Node | None:
    """The nearest checkpoint below ``node``, where there is one way down to it."""
    at = node
    for _ in range(STEPS_MAX):
        if len(at.children) != 1:
            return None
        at = next(iter(at.children.values()))
        if at.slot != PAD:
            return at
    return None


def pages_alone(node: Node) -> int:
    """Pages that would be of no use to anybody without the checkpoint of ``node``."""
    if node.children or node.holds:
        return 0
    pages, at = node.page_count, node.parent
    for _ in range(STEPS_MAX):
        if at is None or at.parent is None or at.slot != PAD or at.holds or len(at.children) > 1:
            break
        pages += at.page_count
        at = at.parent
    return pages


def _tail_towards(node: Node, child: Node) -> Node | None:
    """The longest tail of ``node`` that the tokens of ``child``, a child of it, go through."""
    key = child.key
    for length in range(min(len(key), PAGE_TOKENS * TOKEN_BYTES) - TOKEN_BYTES, 0, -TOKEN_BYTES):
        tail = node.children.get(key[:length])
        if tail is not None:
            return tail
    return None
