"""The frozen values that all of this folder uses: claims, results of lookups, evictions.

    match --> Match ----.
                         v
    transaction: open, extend, save, publish, close, evict --> Reservation --> commit: memory's state
                                                             '---------> ArenaWork: the device

These values cross boundaries. The tree, eviction, leases and the policies read and make them, and the step plan carries
them. So this file imports nothing of ``weft.memory``, and every other file there may import it. ``arena_work``
(operations of the device) and ``reservation`` (changes of a step to memory's state) build on it.

Values are plain numbers in tuples. A node has its id and tokens are bytes. So a value can be compared, hashed
and printed, and it keeps no part of memory's state alive.

Law: L8 (a lost token has its reason).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple, NewType

from weft.units import PAD, FrameId, SlotId

NodeId = NewType("NodeId", int)
"""Id of a node of the prefix tree."""

NO_NODE = NodeId(PAD)
NO_SLOT = SlotId(PAD)

StoreLoss = Literal["stored", "damaged", "store_busy"]
"""Reasons why tokens that a store has were computed all the same."""


class LossReason(NamedTuple):
    """Texts of a reason. ``words``: for an operator; ``short``: at the head of a column. ``is_common``: without a store
    and without debug.count_salt too."""

    words: str
    short: str
    is_common: bool = False


LOSS_REASONS = {
    "no_checkpoint": LossReason("no state kept there", "no state", True),
    "evicted_state": LossReason("its state was evicted", "state gone", True),
    "evicted_kv": LossReason("its KV was evicted", "KV gone", True),
    "not_ready": LossReason("being computed", "not ready", True),
    "salt": LossReason("of another salt", "salt"),
    "stored": LossReason("slower to read from the store", "stored"),
    "damaged": LossReason("damaged in the store", "damaged"),
    "store_busy": LossReason("the store was too slow", "store busy"),
}
"""The fields of ``Lost``, in its order. Counts, the metric and the tables of the CLI follow this one."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Tokens that match something cached and still must be computed (law L8), by reason.

    ``no_checkpoint``: KV matches, but there is no state that far. ``evicted_state``: a state was there and is evicted.
    ``evicted_kv``: the KV is evicted; an upper bound, as only its first page is known to match. ``not_ready``: another
    sequence computes these tokens now, and waiting for it would have taken longer. ``salt``: the tokens are cached
    under another salt. This is counted only if the operator asks for it, because it reveals the prompts of other
    tenants (law L10). ``stored``: reading the tokens from the store would have taken longer than computing.
    ``damaged``: the bytes in the store differed from those written. ``store_busy``: the store did not deliver in time,
    or had no free buffer.
    """

    no_checkpoint: int = 0
    evicted_state: int = 0
    evicted_kv: int = 0
    not_ready: int = 0
    salt: int = 0
    stored: int = 0
    damaged: int = 0
    store_busy: int = 0

    @property
    def total(self) -> int:
        return sum([int(getattr(self, reason)) for reason in LOSS_REASONS])

    def __add__(self, other: Lost) -> Lost:
        return Lost(*[getattr(self, reason) + getattr(other, reason) for reason in LOSS_REASONS])

    def but(self, reason: StoreLoss | Literal["not_ready"], tokens: int) -> Lost:
        """Return the same loss, with its first ``tokens`` counted as ``reason`` only. By position, a match loses
        first to evicted states, then to missing snapshots, then to evicted KV."""
        left = tokens
        remaining = []
        for count in (self.evicted_state, self.no_checkpoint, self.evicted_kv):
            remaining.append(max(0, count - left))
            left = max(0, left - count)
        evicted_state, no_checkpoint, evicted_kv = remaining
        return replace(
            self, no_checkpoint=no_checkpoint, evicted_state=evicted_state, evicted_kv=evicted_kv, **{reason: tokens}
        )


@dataclass(frozen=True, slots=True)
class Recall:
    """The cache policy's memory of a prompt of ``prompt_tokens`` tokens. It is not a hit.

    ``seen_tokens``: how far the prompt was seen before, with or without KV. ``row``: the policy's record of
    the deepest state on the path, PAD without one."""

    prompt_tokens: int = 0
    seen_tokens: int = 0
    row: int = PAD


NOTHING_RECALLED = Recall()


@dataclass(frozen=True, slots=True)
class Match:
    """The cached part of a prompt. The first ``cached_tokens`` need not be computed.

    ``kv_tokens``: how far the KV matches; past ``cached_tokens`` this is a place worth a snapshot, not a hit.
    ``anchor`` and ``version`` are for ``Transaction.open``. ``restore_pages``: pages that opening on the match needs
    besides its own, because KV on the path is compressed."""

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


class FrameKind(Enum):
    PAGES = "pages"
    SLOTS = "slots"


@dataclass(frozen=True, slots=True)
class FrameClaim:
    """A claim: a free frame becomes a frame of ``kind``. ``former_kind``: the kind of its bytes, None if never used."""

    frame: FrameId
    kind: FrameKind
    former_kind: FrameKind | None

    @property
    def needs_zero(self) -> bool:
        return self.former_kind is not self.kind


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A claim on a slot for the state after ``position`` tokens."""

    position: int
    slot: SlotId
    epoch: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """An eviction by kind. ``what`` "state": the snapshot of ``node`` goes, and a tail goes with it. "kv": the pages of
    ``node`` go, except the first ``pages_left``; the node goes with the last page. "slot": the slot goes, because the
    snapshot is compressed. "pages": the KV of ``node`` is compressed and keeps fewer pages."""

    node: NodeId
    what: Literal["state", "kv", "slot", "pages"]
    pages_left: int = 0

    @property
    def compresses(self) -> bool:
        """Whether the contents stay, in 8 bits or less."""
        return self.what in ("slot", "pages")


class SnapshotOutlook(NamedTuple):
    """The outlook of a snapshot. ``uses``: expected from now on, None under a policy that does not know. ``position``:
    tokens of the snapshot. ``alone_bytes``: of its state, and of the KV that only it needs, on one rank."""

    uses: float | None
    position: int
    alone_bytes: int
