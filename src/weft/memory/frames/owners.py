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

``Pages`` and ``Slots`` hold the numbers. Sharing is no count: a lease that reads the tree's pages holds the
node where they end (prefix/tree.py; law L7). A state is overwritten in place and therefore never shared. A
claim on a slot is the pair (slot, epoch). The epoch goes up whenever the slot is given back. So a claim
that outlived its owner differs from every later one, and its use is caught (law L5): its bytes belong to
another sequence.

Rejected: a count of holders (always 0 or 1, and it names none of them); objects in place of numbers (pages by
the million are plain ints in a list).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.frames.packing import Packing
from weft.memory.values import FrameKind
from weft.units import FrameId, PageId, SeqId, SlotId

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


class Pages:
    __slots__ = ("indexes", "owners", "packing")

    def __init__(self, pages_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[PageId] = Packing(FrameKind.PAGES, pages_per_frame)
        self.owners = [FREE] * (pages_per_frame * frame_count)
        self.indexes = [0] * (pages_per_frame * frame_count)

    def take(self, pages: Sequence[PageId]) -> None:
        """Free pages leave the pool; ``give`` sets their owner."""
        self.packing.pop(pages)
        for page in pages:
            assert self.owners[page] == FREE, f"page {page} is held and was drafted as free"

    def give(self, pages: Sequence[PageId], owner: int, first_index: int) -> None:
        """``owner`` gets ``pages`` as its pages number ``first_index``, ``first_index + 1``, ..."""
        for index, page in enumerate(pages, start=first_index):
            self.owners[page] = owner
            self.indexes[page] = index

    def drop(self, pages: Sequence[PageId]) -> list[FrameId]:
        """``pages`` become free. Returns emptied frames."""
        for page in pages:
            assert self.owners[page] != FREE, f"page {page} is free and was given back"
            self.owners[page] = FREE
        return self.packing.push(pages)


class Slots:
    __slots__ = ("epochs", "owners", "packing")

    def __init__(self, slots_per_frame: int, frame_count: int) -> None:
        self.packing: Packing[SlotId] = Packing(FrameKind.SLOTS, slots_per_frame)
        self.owners = [FREE] * (slots_per_frame * frame_count)
        self.epochs = [0] * (slots_per_frame * frame_count)

    def take(self, slots: Sequence[SlotId]) -> None:
        """Free slots leave the pool; ``give`` sets their owner."""
        self.packing.pop(slots)
        for slot in slots:
            assert self.owners[slot] == FREE, f"slot {slot} is held and was drafted as free"

    def give(self, slot: SlotId, owner: int) -> None:
        self.owners[slot] = owner

    def drop(self, slot: SlotId, epoch: int) -> list[FrameId]:
        """Give a claim back. Returns the frame if it is empty now."""
        self.check(slot, epoch)
        self.owners[slot] = FREE
        self.epochs[slot] += 1
        return self.packing.push([slot])

    def check(self, slot: SlotId, epoch: int) -> None:
        """Asserts that the claim (slot, epoch) is alive (law L5)."""
        assert self.owners[slot] != FREE, f"stale claim on slot {slot}: it is free"
        assert self.epochs[slot] == epoch, (
            f"stale claim on slot {slot}: of epoch {epoch}, and the slot is at {self.epochs[slot]}")
