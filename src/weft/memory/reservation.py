"""The changes of one step to memory: leases, and a reservation that is complete before it is committed.

    lease   pages   [ p0 p1 p2 p3 | p4 p5 p6 ]      p of tokens [16 i, 16 i + 16)
                      shared         its own         those of the first ``shared_tokens`` belong to the tree

    transaction.seal() --> Reservation  version | frames pages slots   what is claimed and allocated, in order
                                          | opened extended saved      which lease gets it
                                          | published moves            pages and slots that change their owner
                                          | closed evicted             what is free afterwards
                                          | arena_work table_patches   what the device must do (arena_work.py)

A lease lists everything that one running sequence holds. Only commits write leases.
``state.apply`` writes a reservation into memory's state and decides nothing. The step plan takes ``arena_work`` and the
patches from it. Ids and epochs are part of it, so it can be printed, compared and replayed.

Laws: L2 (all or nothing: whatever is not in the reservation does not happen), L5 (``version``: a reservation
for another state of memory is caught), L6 (frames that change kind are in ``arena_work.zero_frames``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weft.memory.arena_work import NO_WORK, ArenaWork, PageCopy, SlotCopy
from weft.memory.values import NO_NODE, Eviction, FrameClaim, Match, NodeId, Snapshot
from weft.units import PageId, SeqId, SlotId


@dataclass(slots=True)
class Lease:
    seq: SeqId
    pages: list[PageId]
    slot: SlotId
    epoch: int
    cached_tokens: int
    """Tokens with cached KV and state when the lease opened."""
    salt: str = ""
    shared_tokens: int = 0
    """Tokens at the front with pages of the prefix tree: read, never written (law L7)."""
    shared_node: NodeId = NO_NODE
    """The node that ends after ``shared_tokens``; NO_NODE if that is 0."""
    snapshots: list[Snapshot] = field(default_factory=list)
    inexact: bool = False
    """Whether it reads or was computed from data that was compressed once, and so is everything it publishes."""
    loads: bool = False
    """Whether its contents come from a store, not from a sequence that runs."""

    def move_slot(self, src: SlotId, dst: SlotId, epoch: int) -> None:
        """Replace slot ``src``, of the state or of a snapshot of this lease, by ``dst``, to which it moved."""
        if self.slot == src:
            self.slot, self.epoch = dst, epoch
            return
        [index] = [index for index, snapshot in enumerate(self.snapshots) if snapshot.slot == src]
        self.snapshots[index] = Snapshot(self.snapshots[index].position, dst, epoch)


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a lease. ``pages``: all of its pages, those of the tree first. ``slot`` is PAD in a model
    without recurrent layers. ``loads``: its own pages and its state come from a store in this step. ``inexact``: they
    were compressed once, or computed from compressed data."""

    seq: SeqId
    pages: tuple[PageId, ...]
    slot: SlotId
    epoch: int
    match: Match
    loads: bool
    inexact: bool


class Extension(NamedTuple):
    """More pages of an older lease, in order."""

    seq: SeqId
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class Saving:
    """A write of ``seq``, in this step: its state after ``snapshot.position`` tokens goes into ``snapshot.slot``."""

    seq: SeqId
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication: tokens of ``seq`` from position ``start`` on go into the tree.

    ``pages``: the pages of the path afterwards, by complete page; the tree has those up to position ``cached_end``
    already. ``tokens``: int32 bytes; the last page is partly filled if the last of ``saves`` is inside it."""

    seq: SeqId
    start: int
    tokens: bytes = field(repr=False)
    pages: tuple[PageId, ...]
    cached_end: int
    saves: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class TablePatch:
    """A patch of a page table: from this step on, the entries of ``seq`` from ``first_index`` on are ``pages``. They
    hold the same tokens: the sequence adopted the tree's pages, or its own were moved."""

    seq: SeqId
    first_index: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class SlotPatch:
    """A patch of a slot: from this step on, the state of ``seq`` is in ``slot``, where it was moved."""

    seq: SeqId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages and slots that move so that frames become free (relief.py), and the patches that follow. The
    copies are part of ``arena_work`` and the patches of ``table_patches`` too."""

    pages: tuple[PageCopy, ...] = ()
    slots: tuple[SlotCopy, ...] = ()
    table_patches: tuple[TablePatch, ...] = ()
    slot_patches: tuple[SlotPatch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pages or self.slots)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Everything that one step changes in memory's state, from the version it was planned on.

    ``pages`` and ``slots`` are allocated, in this order; openings, extensions, savings and moves assign them.
    ``frames`` are claimed first. ``closed`` leases and ``evicted`` data are freed last. Compressions and restores are
    in ``arena_work`` only: memory's state follows the device's work.
    """

    version: int
    frames: tuple[FrameClaim, ...]
    pages: tuple[PageId, ...]
    slots: tuple[SlotId, ...]
    opened: tuple[Opening, ...]
    extended: tuple[Extension, ...]
    closed: tuple[SeqId, ...]
    saved: tuple[Saving, ...] = ()
    published: tuple[Publication, ...] = ()
    evicted: tuple[Eviction, ...] = ()
    table_patches: tuple[TablePatch, ...] = ()
    moves: Moves = Moves()
    arena_work: ArenaWork = NO_WORK
