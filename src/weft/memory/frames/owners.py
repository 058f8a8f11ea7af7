"""The owner of each page and slot, as one number beside it.

    FREE = 0                   free
    seq + 1                    the lease of a sequence
    -1 - id                    the prefix tree: an edge for a page, a node for a slot
    COMPRESSED_KV - id         the prefix tree: a node, for a page of its compressed KV
    COMPRESSED_STATE - id      the prefix tree: a node, for a page of its compressed state

Commits write the number when an item changes hands, and at no other time. So the owner of a page that moves
is known without a scan of leases or of the tree. This is law L1's one owner, written down; ``audit`` recounts
it from leases and nodes.

``indexes`` says which page of its sequence a page is, from the front. With it, a page that moves is put back
into its place in O(1). The number is the same for the lease that wrote a page and for the tree that adopted
it.

Rejected: a count of holders (always 0 or 1, and it names none of them); objects in place of numbers (pages by
the million are plain ints in a list).
"""

from __future__ import annotations

from weft.units import SeqId

FREE = 0
COMPRESSED_KV = -1 << 61
COMPRESSED_STATE = -1 << 62


def of_lease(seq: SeqId) -> int:
    return seq + 1


def of_tree(tree_id: int) -> int:
    """``tree_id``: the id of an edge (pages) or of a node (slots)."""
    return -1 - tree_id


def of_compressed_state(node: int) -> int:
    """``node``: the id of the node with the compressed state."""
    return COMPRESSED_STATE - node


def of_compressed_kv(node: int) -> int:
    """``node``: the id of the node with the compressed KV."""
    return COMPRESSED_KV - node


def kv_node_of(owner: int) -> int | None:
    """The node of a page of compressed KV; None for other pages."""
    return COMPRESSED_KV - owner if COMPRESSED_STATE < owner <= COMPRESSED_KV else None


def state_node_of(owner: int) -> int | None:
    """The node of a page of a compressed state; None for other pages."""
    return COMPRESSED_STATE - owner if owner <= COMPRESSED_STATE else None


def is_compressed(owner: int) -> bool:
    """Whether a page holds compressed data."""
    return owner <= COMPRESSED_KV


def lease_of(owner: int) -> SeqId | None:
    """The sequence of ``owner``; None for the tree."""
    assert owner != FREE
    return SeqId(owner - 1) if owner > 0 else None


def tree_id_of(owner: int) -> int:
    assert COMPRESSED_KV < owner < 0, "it is free, or belongs to a lease or to compressed data"
    return -1 - owner
