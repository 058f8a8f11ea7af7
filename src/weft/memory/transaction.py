"""A step's memory in one transaction: a draft that changes nothing, a reservation, one writer.

    books --Draft reads--> open / extend / close ... --seal--> Reservation --apply--> books, one version on
                              |
                              +-- dropped: nothing to undo, nothing was done

A ``Draft`` is an overlay. It walks the free frames, pages and slots in the order in which they would be
taken (``arena.FrameWalk``, ``packing.Walk``), keeps what each sequence gets, and writes nothing outside
itself: dropping it is the whole of the rollback. The ``Reservation`` is complete, ids and epochs
included, so ``apply`` decides nothing: it takes what it is told, asserts that it was free and next, and
is the only code that writes the books. Whether something fits is therefore answered by the same walk
that hands it out; there is no predictor that could disagree (law L2).

Laws: L2 (each verb takes all it needs or nothing), L3 (what does not fit is False or None), L5 (a draft
of an older version of the books is caught when it is used, a reservation when it is applied), L6
(``zero_frames``: the claimed frames whose bytes are not of their new kind).

What a draft closes is free from the next draft on, not inside the same one: the memory of a sequence
that the step in flight may still be reading is never handed out under it, and ``apply`` can take
everything before it gives anything back.

Rejected: taking at once and undoing on failure (two writers, and every error path must be right);
deep copies of the books (a step that crosses no page must cost nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.memory.arena import Arena, FrameClaim, FrameKind, FrameWalk
from weft.memory.lease import NO_SLOT, Lease
from weft.memory.packing import Walk
from weft.memory.pages import Pages
from weft.memory.plan import ArenaPlan
from weft.memory.slots import Slots
from weft.units import PAGE_TOKENS, FrameId, PageId, SeqId, SlotId, pages_for

LostReason = Literal["no_checkpoint"]


@dataclass(frozen=True, slots=True)
class Match:
    """What is there of a prompt already: ``cached_tokens`` need not be computed; ``lost_tokens`` were
    there in part and cannot be used, for ``lost_reason`` (law L8)."""

    cached_tokens: int
    lost_tokens: int
    lost_reason: LostReason


@dataclass(frozen=True, slots=True)
class Opening:
    """A lease begins. ``slot`` is PAD in a model without recurrent layers."""

    seq: SeqId
    pages: tuple[PageId, ...]
    slot: SlotId
    epoch: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Extension:
    """A lease that was there gets more pages, in order."""

    seq: SeqId
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Everything one step changes in the books, from the version it was drafted on.

    ``pages`` and ``slots`` are what is taken, in allocation order; openings and extensions say who gets
    which. ``frames`` are claimed first, ``closed`` leases are given back last.
    """

    version: int
    frames: tuple[FrameClaim, ...]
    pages: tuple[PageId, ...]
    slots: tuple[SlotId, ...]
    opened: tuple[Opening, ...]
    extended: tuple[Extension, ...]
    closed: tuple[SeqId, ...]

    @property
    def zero_frames(self) -> tuple[FrameId, ...]:
        """Frames to zero before the step computes anything (law L6)."""
        return tuple(claim.frame for claim in self.frames if claim.needs_zero)


class Books:
    """All that is ever written, in one place. Only ``apply`` writes it."""

    __slots__ = ("arena", "leases", "pages", "plan", "slots", "version")

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self.arena = Arena(plan.frame_count)
        self.pages = Pages(plan.pages_per_frame, plan.frame_count)
        self.slots = Slots(plan.slots_per_frame, plan.frame_count)
        self.leases: dict[SeqId, Lease] = {}
        self.version = 0


class Draft:
    """One step's wishes. Made by ``Memory.draft``; ends in ``seal`` or is dropped."""

    __slots__ = ("_books", "_closed", "_frames", "_gained", "_opened", "_page_walk", "_slot_walk", "_version")

    def __init__(self, books: Books) -> None:
        self._books = books
        self._version = books.version
        self._frames = FrameWalk(books.arena)
        self._page_walk = Walk(books.pages.packing, self._frames)
        self._slot_walk = Walk(books.slots.packing, self._frames)
        self._opened: dict[SeqId, Lease] = {}
        self._gained: dict[SeqId, list[PageId]] = {}
        self._closed: dict[SeqId, None] = {}

    def open(self, seq: SeqId, match: Match, tokens: int, *, headroom_pages: int = 0) -> bool:
        """A lease with a slot and pages for ``tokens`` tokens, or False and nothing. ``headroom_pages``
        must stay free after it."""
        self._check_current()
        assert seq not in self._books.leases, f"sequence {seq} has a lease"
        assert seq not in self._opened, f"sequence {seq} was opened in this draft"
        plan, pages, slots = self._books.plan, self._page_walk, self._slot_walk
        page_count = plan.pages_for(tokens)
        frames_left = self._frames.left
        if plan.slots_per_frame and not slots.left:
            frames_left -= 1
        headroom = headroom_pages if plan.pages_per_frame else 0
        if frames_left < 0 or pages.left + frames_left * plan.pages_per_frame < page_count + headroom:
            return False
        slot, epoch = NO_SLOT, 0
        if plan.slots_per_frame:
            [slot] = slots.take(1)
            epoch = self._books.slots.epochs[slot]
        self._opened[seq] = Lease(seq, [], slot, epoch, match.cached_tokens)
        self._gained[seq] = pages.take(page_count)
        return True

    def extend(self, seq: SeqId, tokens: int) -> bool:
        """Room for ``tokens`` tokens in all; True at once where the lease has it, False and nothing where
        the arena does not."""
        lease = self._lease(seq)
        gained = self._gained.get(seq)
        held = len(lease.pages) + (len(gained) if gained is not None else 0)
        if tokens <= held * PAGE_TOKENS or not self._books.plan.pages_per_frame:
            return True
        missing = pages_for(tokens) - held
        if self._page_walk.room < missing:
            return False
        pages = self._page_walk.take(missing)
        if gained is None:
            self._gained[seq] = pages
        else:
            gained += pages
        return True

    def save(self, seq: SeqId, position: int) -> SlotId | None:
        """A slot for the state of ``seq`` after ``position`` tokens, or None: best effort (law L9). While
        no prefix tree owns checkpoints nothing is kept, and the answer is None."""
        self._lease(seq)
        return None

    def close(self, seq: SeqId) -> None:
        """The lease ends; what it holds, and what this draft gave it, is free from the next draft on."""
        self._lease(seq)
        self._closed[seq] = None

    def new_pages(self, seq: SeqId) -> list[PageId]:
        """Pages that this draft gives ``seq``, in order; they follow those of its lease."""
        return self._gained.get(seq, [])

    def slot_of(self, seq: SeqId) -> SlotId:
        """The slot of ``seq``, PAD in a model without recurrent layers."""
        lease = self._lease(seq)
        if seq in self._books.leases and self._books.plan.slots_per_frame:
            self._books.slots.check(lease.slot, lease.epoch)
        return lease.slot

    def seal(self) -> Reservation:
        """The frozen sum of this draft so far. A reading: what the draft takes later is not in it."""
        self._check_current()
        opened = tuple(Opening(seq, tuple(self._gained[seq]), lease.slot, lease.epoch, lease.cached_tokens)
                       for seq, lease in self._opened.items())
        extended = tuple(Extension(seq, tuple(pages))
                         for seq, pages in self._gained.items() if seq not in self._opened)
        return Reservation(
            version=self._version,
            frames=tuple(self._frames.claims),
            pages=tuple(self._page_walk.taken),
            slots=tuple(self._slot_walk.taken),
            opened=opened,
            extended=extended,
            closed=tuple(self._closed),
        )

    def _lease(self, seq: SeqId) -> Lease:
        self._check_current()
        assert seq not in self._closed, f"sequence {seq} was closed in this draft"
        lease = self._books.leases.get(seq) or self._opened.get(seq)
        assert lease is not None, f"sequence {seq} has no lease"
        return lease

    def _check_current(self) -> None:
        assert self._version == self._books.version, (
            f"a draft of version {self._version} was used on version {self._books.version}")


def apply(books: Books, reservation: Reservation) -> None:
    """Write ``reservation`` into ``books``: claim frames, take, hand out, give back. Asserts that the books
    are those it was drafted on and that everything it takes is free and next."""
    assert reservation.version == books.version, (
        f"a reservation of version {reservation.version} was committed to version {books.version}")
    for claim in reservation.frames:
        books.arena.claim(claim)
        packing = books.pages.packing if claim.kind is FrameKind.PAGES else books.slots.packing
        packing.add(claim.frame)
    books.pages.take(reservation.pages)
    books.slots.take(reservation.slots)
    for opening in reservation.opened:
        assert opening.seq not in books.leases, f"sequence {opening.seq} has a lease"
        books.leases[opening.seq] = Lease(opening.seq, list(opening.pages), opening.slot, opening.epoch,
                                          opening.cached_tokens)
    for extension in reservation.extended:
        books.leases[extension.seq].pages.extend(extension.pages)
    for seq in reservation.closed:
        _give_back(books, books.leases.pop(seq))
    books.version += 1


def _give_back(books: Books, lease: Lease) -> None:
    _release(books.arena, books.pages.drop(lease.pages), FrameKind.PAGES)
    if books.plan.slots_per_frame:
        _release(books.arena, books.slots.drop(lease.slot, lease.epoch), FrameKind.SLOTS)


def _release(arena: Arena, frames: Sequence[FrameId], kind: FrameKind) -> None:
    for frame in frames:
        arena.release(frame, kind)
