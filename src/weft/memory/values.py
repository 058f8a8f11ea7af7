"""The frozen values of a step's memory: what a lookup found, and what a reservation will change.

Everything here is plain numbers in tuples, made by ``draft`` and read by ``transaction.apply`` and by the
plan of the step. Nodes are named by id and tokens are bytes, so that a value compares, hashes and prints,
and holds nothing of the books alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.memory.frames.arena import FrameClaim
from weft.memory.lease import Checkpoint
from weft.memory.prefix.compressed_kv import CompressKv, RestoreKv
from weft.memory.prefix.eviction import Eviction
from weft.memory.prefix.tree import NO_NODE, NodeId
from weft.units import PAD, FrameId, PageId, SeqId, SlotId

LostReason = Literal["no_checkpoint", "evicted_state", "evicted_kv", "not_ready", "salt"]


@dataclass(frozen=True, slots=True)
class Lost:
    """Tokens that were there in part and cannot be used (law L8). ``no_checkpoint``: KV matches, and no
    state was kept so far on; ``evicted_state``: one was, and is gone; ``evicted_kv``: the KV is gone (at
    most so many: of what was evicted the first page is known to match); ``not_ready``: another sequence
    computes them now, and waiting for it would have taken longer; ``salt``: another namespace has them,
    looked at only where the operator wants it counted, as it says what others asked (law L10)."""

    no_checkpoint: int = 0
    evicted_state: int = 0
    evicted_kv: int = 0
    not_ready: int = 0
    salt: int = 0

    @property
    def total(self) -> int:
        return self.no_checkpoint + self.evicted_state + self.evicted_kv + self.not_ready + self.salt

    def but_not_ready(self, tokens: int) -> Lost:
        """The first ``tokens`` of what was lost, or more than that, are ``not_ready`` and nothing else. What
        a match loses is, in the order of positions: evicted states, no checkpoint, evicted KV."""
        left = tokens
        remaining = []
        for count in (self.evicted_state, self.no_checkpoint, self.evicted_kv):
            remaining.append(max(0, count - left))
            left = max(0, left - count)
        evicted_state, no_checkpoint, evicted_kv = remaining
        return Lost(no_checkpoint, evicted_state, evicted_kv, tokens, self.salt)


@dataclass(frozen=True, slots=True)
class Recall:
    """What the cache policy remembers of a prompt of ``prompt_tokens``: how far it was seen before, with KV
    or without, and the policy's own record of the deepest state on the way, PAD without one. It is no hit."""

    prompt_tokens: int = 0
    seen_tokens: int = 0
    row: int = PAD


NOTHING_RECALLED = Recall()


@dataclass(frozen=True, slots=True)
class Match:
    """What is there of a prompt already: ``cached_tokens`` need not be computed. ``kv_tokens``: how far KV
    matches; beyond ``cached_tokens`` it is a place worth a checkpoint, not a hit. ``anchor`` and
    ``version`` are for ``Draft.open``. ``restore_pages``: what opening on it takes besides, as KV on the way
    is compressed."""

    cached_tokens: int = 0
    lost: Lost = Lost()
    kv_tokens: int = 0
    anchor: NodeId = NO_NODE
    salt: str = ""
    version: int = 0
    recall: Recall = NOTHING_RECALLED
    restore_pages: int = 0

    @property
    def lost_tokens(self) -> int:
        return self.lost.total

    @property
    def lost_reason(self) -> LostReason:
        """The reason of most of them; "no_checkpoint" where nothing is lost."""
        counts: dict[LostReason, int] = {"no_checkpoint": self.lost.no_checkpoint,
                                         "evicted_state": self.lost.evicted_state,
                                         "evicted_kv": self.lost.evicted_kv,
                                         "not_ready": self.lost.not_ready, "salt": self.lost.salt}
        return max(counts, key=lambda reason: counts[reason])


@dataclass(frozen=True, slots=True)
class Opening:
    """A lease begins: ``pages`` are all of its pages, those of the tree first. ``slot`` is PAD in a model
    without recurrent layers."""

    seq: SeqId
    pages: tuple[PageId, ...]
    slot: SlotId
    epoch: int
    match: Match


@dataclass(frozen=True, slots=True)
class Extension:
    """A lease that was there gets more pages, in order."""

    seq: SeqId
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Before anything is computed, all bytes of page ``src`` go to page ``dst``."""

    src: PageId
    dst: PageId


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Before anything is computed, all bytes of slot ``src`` go to slot ``dst``, whose run is not fresh."""

    src: SlotId
    dst: SlotId


@dataclass(frozen=True, slots=True)
class CompressState:
    """Before anything is computed, the state in ``slot``, the checkpoint of ``node``, goes to ``pages`` in
    8 bits."""

    node: NodeId
    slot: SlotId
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Before anything is computed, the state that is compressed in ``pages`` goes to ``slot``, whose run is not
    fresh."""

    pages: tuple[PageId, ...]
    slot: SlotId


@dataclass(frozen=True, slots=True)
class TablePatch:
    """From this step on the entries of ``seq`` in the page table from ``first_index`` on are ``pages``,
    which hold the same tokens: those it had are given up for the tree's, or have moved."""

    seq: SeqId
    first_index: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class SlotPatch:
    """From this step on the state of ``seq`` is in ``slot``: it was moved there."""

    seq: SeqId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages and slots that go elsewhere so that frames become free (compaction.py), and who is told. Copies
    and patches of tables are among those of the reservation too."""

    pages: tuple[PageCopy, ...] = ()
    slots: tuple[SlotCopy, ...] = ()
    table_patches: tuple[TablePatch, ...] = ()
    slot_patches: tuple[SlotPatch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pages or self.slots)


@dataclass(frozen=True, slots=True)
class Saving:
    """``seq`` writes its state after ``checkpoint.position`` tokens into ``checkpoint.slot`` in this step."""

    seq: SeqId
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Publication:
    """Tokens of ``seq`` from position ``start`` on go into the tree. ``pages``: the pages that the path has
    then, by whole page; up to position ``there`` they are in the tree before. ``tokens``: int32 bytes,
    with less than a page at the end when the last of ``saves`` stands inside one."""

    seq: SeqId
    start: int
    tokens: bytes = field(repr=False)
    pages: tuple[PageId, ...]
    there: int
    saves: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Everything one step changes in the books, from the version it was drafted on.

    ``pages`` and ``slots`` are what is taken, in allocation order; openings, extensions, savings and moves
    say who gets which. ``frames`` are claimed first; ``closed`` leases are given back, and what is
    ``evicted`` with them, last.

    For the step itself, in this order and before anything is computed: ``zero_frames``, what is compressed and
    restored, the copies, the patches of the page table.
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
    page_copies: tuple[PageCopy, ...] = ()
    slot_copies: tuple[SlotCopy, ...] = ()
    table_patches: tuple[TablePatch, ...] = ()
    moves: Moves = Moves()
    compressed: tuple[CompressState, ...] = ()
    restored: tuple[RestoreState, ...] = ()
    kv_compressed: tuple[CompressKv, ...] = ()
    kv_restored: tuple[RestoreKv, ...] = ()

    @property
    def zero_frames(self) -> tuple[FrameId, ...]:
        """Frames to zero before the step computes anything (law L6)."""
        return tuple(claim.frame for claim in self.frames if claim.needs_zero)
