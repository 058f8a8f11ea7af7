"""What a checkpoint holds and saves: the bytes that only it needs, and where a sequence would resume without
it.

    root --[ 0..512 )--+--[ 512..2048 )  state A     A alone holds its own node: 96 pages; [0..512) is B's too
                       '--[ 512..1024 )--[ 1024..4096 )  state B

Two states that share all of their KV hold none of it *alone*: evicting either frees only the state. So the
one that is cheaper to compute again goes first, and then the other holds all of that KV.

Pure readings of a few nodes, at most STEPS_MAX (law L11). A prompt with a checkpoint every 64 tokens has a
thousand nodes, and bytes far above the checkpoint carry no weight.
"""

from __future__ import annotations

from weft.memory.prefix.edge import TOKEN_BYTES, Node
from weft.units import PAD, PAGE_TOKENS

STEPS_MAX = 64


def checkpoint_above(node: Node) -> Node | None:
    """The nearest checkpoint on the path above ``node``; a tail along its tokens counts. None: no checkpoint
    is near."""
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


def checkpoint_at_or_above(node: Node) -> Node | None:
    return node if node.slot != PAD else checkpoint_above(node)


def only_checkpoint_below(node: Node) -> Node | None:
    """The nearest checkpoint below ``node``, if a single path leads down to it."""
    at = node
    for _ in range(STEPS_MAX):
        if len(at.children) != 1:
            return None
        at = next(iter(at.children.values()))
        if at.slot != PAD:
            return at
    return None


def pages_alone(node: Node) -> int:
    """Pages that no request could use without the checkpoint of ``node``."""
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
    """The longest tail of ``node`` along the tokens of its child ``child``."""
    key = child.key
    for length in range(min(len(key), PAGE_TOKENS * TOKEN_BYTES) - TOKEN_BYTES, 0, -TOKEN_BYTES):
        tail = node.children.get(key[:length])
        if tail is not None:
            return tail
    return None
