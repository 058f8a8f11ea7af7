"""Who holds a page or a slot, as one number beside it.

    FREE = 0          free
    seq + 1             the lease of a sequence
    -1 - id             the prefix tree: a edge for a page, a node for a slot
    PACKED_KV - id        the prefix tree: a node, for a page with some of its compressed KV
    COMPRESSED - id         the prefix tree: a node, for a page with a piece of its compressed state

One int per page and slot, written by commits when something changes hands and at no other time, so whoever
has a page in hand knows whom to tell that it moves: no scan of leases, none of the tree. It is law L1's one
owner, written down; ``audit`` recounts it from leases and nodes.

With ``indexes`` (which page of its sequence a page is, from its front) a page that moves is put back into its
place in O(1). That number is the same for the lease that wrote a page and for the tree that took it over.

Rejected: a count of holders (0 or 1 always, and it does not say who); objects instead of numbers (pages by
the million are plain ints in a list).
"""

from __future__ import annotations

from weft.units import SeqId

FREE = 0
PACKED_KV = -1 << 61
COMPRESSED = -1 << 62


def of_lease(seq: SeqId) -> int:
    return seq + 1


def of_tree(name: int) -> int:
    """``name``: the id of a edge (pages) or of a node (slots)."""
    return -1 - name


def of_compressed_state(name: int) -> int:
    """``name``: the id of the node whose state is compressed there."""
    return COMPRESSED - name


def of_compressed_kv(name: int) -> int:
    """``name``: the id of the node whose KV is compressed there."""
    return PACKED_KV - name


def kv_node_of(owner: int) -> int | None:
    """The node whose compressed KV a page has some of, None where it has something else."""
    return PACKED_KV - owner if COMPRESSED < owner <= PACKED_KV else None


def state_node_of(owner: int) -> int | None:
    """The node whose compressed state a page has a piece of, None where it has KV."""
    return COMPRESSED - owner if owner <= COMPRESSED else None


def is_compressed(owner: int) -> bool:
    """Whether a page has something in 8 bits."""
    return owner <= PACKED_KV


def lease_of(owner: int) -> SeqId | None:
    """The sequence that ``owner`` means, None where it is the tree."""
    assert owner != FREE
    return SeqId(owner - 1) if owner > 0 else None


def tree_id_of(owner: int) -> int:
    assert PACKED_KV < owner < 0, "it belongs to a lease, to nobody, or to something compressed"
    return -1 - owner
