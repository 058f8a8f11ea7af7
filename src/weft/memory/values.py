"""The frozen values of a step's memory: what a lookup finds, and what a reservation changes.

    match ----> Match -----------.
                                  v
    draft: open, extend, save, publish, close, evict ----> Reservation ----> commit      the books
                                                               '-----------> StepPlan    the device

These values cross boundaries: ``draft`` makes them, ``transaction.apply`` writes them into the books, and
the step plan takes its share of them to the device. So they stand on the ground of this folder: this file
imports nothing of ``weft.memory``, and every other file may import it.

They are plain numbers in tuples. A node has its id and tokens are bytes, so a value can be compared, hashed
and printed, and it keeps no part of the books alive.

Laws: L2 (a reservation is complete: ids and epochs included), L8 (lost tokens have a reason).

Rejected: values beside the mechanisms that use them (imports then run both ways between the tree, eviction,
compression and the draft); nodes by reference (a reservation would change when the tree does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from weft.units import PAD, FrameId, PageId, SeqId, SlotId

Int32s = npt.NDArray[np.int32]

NodeId = NewType("NodeId", int)
"""A node of the prefix tree."""

NO_NODE = NodeId(PAD)
NO_SLOT = SlotId(PAD)

LostReason = Literal["no_checkpoint", "evicted_state", "evicted_kv", "not_ready", "salt"]


# ---------------------------------------------------------------------- what a lookup finds


@dataclass(frozen=True, slots=True)
class Lost:
    """Tokens that match something cached and still must be computed (law L8), by reason.

    ``no_checkpoint``: KV matches, but no state lies so far on. ``evicted_state``: a state was there and is
    evicted. ``evicted_kv``: the KV is evicted; an upper bound, as only its first page is known to match.
    ``not_ready``: another sequence computes these tokens now, and waiting for it would have taken longer.
    ``salt``: another namespace has them. This is counted only if the operator asks for it, because it reveals
    what other tenants sent (law L10)."""

    no_checkpoint: int = 0
    evicted_state: int = 0
    evicted_kv: int = 0
    not_ready: int = 0
    salt: int = 0

    @property
    def total(self) -> int:
        return self.no_checkpoint + self.evicted_state + self.evicted_kv + self.not_ready + self.salt

    def but_not_ready(self, tokens: int) -> Lost:
        """The same loss, with its first ``tokens`` counted as ``not_ready`` only. By position, a match loses
        first to evicted states, then to missing checkpoints, then to evicted KV."""
        left = tokens
        remaining = []
        for count in (self.evicted_state, self.no_checkpoint, self.evicted_kv):
            remaining.append(max(0, count - left))
            left = max(0, left - count)
        evicted_state, no_checkpoint, evicted_kv = remaining
        return Lost(no_checkpoint, evicted_state, evicted_kv, tokens, self.salt)


@dataclass(frozen=True, slots=True)
class Recall:
    """What the cache policy remembers of a prompt of ``prompt_tokens`` tokens. It is no hit.

    ``seen_tokens``: how far the prompt was seen before, with or without KV. ``row``: the policy's record of
    the deepest state on the path, PAD without one."""

    prompt_tokens: int = 0
    seen_tokens: int = 0
    row: int = PAD


NOTHING_RECALLED = Recall()


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache has of a prompt. The first ``cached_tokens`` need not be computed.

    ``kv_tokens``: how far the KV matches; past ``cached_tokens`` this is a place worth a checkpoint, not a
    hit. ``anchor`` and ``version`` are for ``Draft.open``. ``restore_pages``: pages that opening on the match
    needs besides its own, because KV on the path is compressed."""

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
        """The reason of most lost tokens; "no_checkpoint" if none are lost."""
        counts: dict[LostReason, int] = {"no_checkpoint": self.lost.no_checkpoint,
                                         "evicted_state": self.lost.evicted_state,
                                         "evicted_kv": self.lost.evicted_kv,
                                         "not_ready": self.lost.not_ready, "salt": self.lost.salt}
        return max(counts, key=lambda reason: counts[reason])


# ---------------------------------------------------------------------- frames and leases


class FrameKind(Enum):
    PAGES = "pages"
    SLOTS = "slots"


@dataclass(frozen=True, slots=True)
class FrameClaim:
    """A free frame becomes a frame of ``kind``. ``held``: the kind of its bytes, None if never used."""

    frame: FrameId
    kind: FrameKind
    held: FrameKind | None

    @property
    def needs_zero(self) -> bool:
        return self.held is not self.kind


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A claim on a slot for the state after ``position`` tokens."""

    position: int
    slot: SlotId
    epoch: int


@dataclass(frozen=True, slots=True)
class Opening:
    """A lease begins. ``pages``: all of its pages, those of the tree first. ``slot`` is PAD in a model without
    recurrent layers."""

    seq: SeqId
    pages: tuple[PageId, ...]
    slot: SlotId
    epoch: int
    match: Match


@dataclass(frozen=True, slots=True)
class Extension:
    """An older lease gets more pages, in order."""

    seq: SeqId
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class Saving:
    """In this step ``seq`` writes its state after ``checkpoint.position`` tokens into ``checkpoint.slot``."""

    seq: SeqId
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Publication:
    """Tokens of ``seq`` from position ``start`` on go into the tree.

    ``pages``: the pages of the path afterwards, by whole page; the tree has those up to position
    ``cached_end`` already. ``tokens``: int32 bytes; the last page is partly filled if the last of ``saves``
    lies inside it."""

    seq: SeqId
    start: int
    tokens: bytes = field(repr=False)
    pages: tuple[PageId, ...]
    cached_end: int
    saves: tuple[Checkpoint, ...]


@dataclass(frozen=True, slots=True)
class Eviction:
    """``what`` "state": the checkpoint of ``node`` goes, and a tail goes whole. "kv": the pages of ``node``
    go, except the first ``pages_left``; the node goes with the last page. "slot": the slot goes, because the
    checkpoint is compressed. "pages": the KV of ``node`` is compressed and keeps fewer pages."""

    node: NodeId
    what: Literal["state", "kv", "slot", "pages"]
    pages_left: int = 0

    @property
    def compresses(self) -> bool:
        """The contents stay, in 8 bits or less."""
        return self.what in ("slot", "pages")


# ---------------------------------------------------------------------- work on the arena


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Before the step computes, all bytes of page ``src`` are copied to page ``dst``."""

    src: PageId
    dst: PageId


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Before the step computes, all bytes of slot ``src`` are copied to slot ``dst``. The run of ``dst`` is
    not fresh."""

    src: SlotId
    dst: SlotId


@dataclass(frozen=True, slots=True)
class CompressState:
    """Before the step computes, the state in ``slot``, the checkpoint of ``node``, is written to ``pages`` in 8
    bits."""

    node: NodeId
    slot: SlotId
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Before the step computes, the state compressed in ``pages`` is written to ``slot``. The run of ``slot``
    is not fresh."""

    pages: tuple[PageId, ...]
    slot: SlotId


class KvForm(NamedTuple):
    """Bytes of a page of KV, exact and compressed."""

    page_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class CompressKv:
    """Before the step computes, the KV of ``node`` in ``pages`` is compressed into the first ``packed_count``
    of them. The others are free from the next draft on."""

    node: NodeId
    pages: tuple[PageId, ...]
    packed_count: int
    form: KvForm

    @property
    def packed(self) -> tuple[PageId, ...]:
        """The pages that hold the records afterwards."""
        return self.pages[:self.packed_count]

    @property
    def rows(self) -> Int32s:
        """int32 [records, 4], in an order that works in place: a page, the first and the last page of its
        record, and the byte of the first page where the record begins."""
        return _record_rows(self.pages, self.packed, 0, self.form)


@dataclass(frozen=True, slots=True)
class RestoreKv:
    """Before the step computes, the compressed KV of ``node`` is written to ``pages``. It begins at byte
    ``skip_bytes`` of ``packed``.

    ``pages`` are most of ``packed`` and some new ones. The rest of ``packed`` is free from the next draft
    on."""

    node: NodeId
    packed: tuple[PageId, ...]
    skip_bytes: int
    pages: tuple[PageId, ...]
    form: KvForm

    @property
    def rows(self) -> Int32s:
        """As ``CompressKv.rows``, the last record first."""
        return _record_rows(self.pages, self.packed, self.skip_bytes, self.form)[::-1]


def _record_rows(pages: Sequence[PageId], packed: Sequence[PageId], skip_bytes: int, form: KvForm) -> Int32s:
    start = skip_bytes + np.arange(len(pages), dtype=np.int64) * form.record_bytes
    lies_on = np.asarray(packed, dtype=np.int64)
    first, last = start // form.page_bytes, (start + form.record_bytes - 1) // form.page_bytes
    columns = (np.asarray(pages, dtype=np.int64), lies_on[first], lies_on[last], start % form.page_bytes)
    return np.stack(columns, axis=1).astype(np.int32)


# ---------------------------------------------------------------------- moves and the sum


@dataclass(frozen=True, slots=True)
class TablePatch:
    """From this step on, the page-table entries of ``seq`` from ``first_index`` on are ``pages``. They hold
    the same tokens: the sequence adopted the tree's pages, or its own were moved."""

    seq: SeqId
    first_index: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class SlotPatch:
    """From this step on, the state of ``seq`` is in ``slot``, where it was moved."""

    seq: SeqId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Moves:
    """Pages and slots that move so that frames become free (compaction.py), and the patches that follow. The
    reservation's own copies and table patches include them."""

    pages: tuple[PageCopy, ...] = ()
    slots: tuple[SlotCopy, ...] = ()
    table_patches: tuple[TablePatch, ...] = ()
    slot_patches: tuple[SlotPatch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pages or self.slots)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Everything that one step changes in the books, from the version it was drafted on.

    ``pages`` and ``slots`` are allocated, in this order; openings, extensions, savings and moves assign them.
    ``frames`` are claimed first. ``closed`` leases and what is ``evicted`` are freed last.

    For the step itself, in this order and before it computes: ``zero_frames``, compressions and restores,
    copies, patches of the page table.
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
