"""A step's memory in one transaction: a draft that changes nothing, a reservation, one writer.

    books --Draft reads--> open / extend / close ... --seal--> Reservation --apply--> books, one version on
                              |
                              +-- dropped: nothing to undo, nothing was done

A ``Draft`` (draft.py) is an overlay: dropping it is the whole of the rollback. The ``Reservation``
(reservation.py) is complete, ids and epochs included, so ``apply`` decides nothing: it takes what it is
told, asserts that it was free and next, and is the only code that writes the books. Whether something
fits is therefore answered by the same walk that hands it out; there is no predictor that could disagree
(law L2).

Order: everything is taken before anything is given back, and the tree grows before it is cut. So what a
draft closes, gives up for the tree's pages or evicts is free from the next draft on, and never handed out
under a sequence that the step in flight may still be reading.

Laws: L2 (each verb takes all it needs or nothing), L3 (what does not fit is False or None), L5 (a draft
of an older version of the books is caught when it is used, a reservation when it is applied), L6
(``zero_frames``: the claimed frames whose bytes are not of their new kind).

Rejected: taking at once and undoing on failure (two writers, and every error path must be right);
deep copies of the books (a step that crosses no page must cost nothing).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.memory.arena import Arena, FrameKind
from weft.memory.books import Books
from weft.memory.cache import Fallen
from weft.memory.lease import Lease
from weft.memory.reservation import Opening, Reservation
from weft.memory.tree import NO_SLOT
from weft.units import PAGE_TOKENS, FrameId


def apply(books: Books, reservation: Reservation) -> None:
    """Write ``reservation`` into ``books``: claim frames, take, hand out, grow the tree, give back. Asserts
    that the books are those it was drafted on and that everything it takes is free and next."""
    assert reservation.version == books.version, (
        f"a reservation of version {reservation.version} was committed to version {books.version}")
    for claim in reservation.frames:
        books.arena.claim(claim)
        packing = books.pages.packing if claim.kind is FrameKind.PAGES else books.slots.packing
        packing.add(claim.frame)
    books.pages.take(reservation.pages)
    books.slots.take(reservation.slots)
    for opening in reservation.opened:
        _open(books, opening)
    for extension in reservation.extended:
        books.leases[extension.seq].pages.extend(extension.pages)
    for publication in reservation.published:
        _give_back(books, books.cache.publish(books.leases[publication.seq], publication))
    for saving in reservation.saved:
        books.leases[saving.seq].taps.append(saving.checkpoint)
    for seq in reservation.closed:
        _close(books, books.leases.pop(seq))
    for eviction in reservation.evicted:
        _give_back(books, books.cache.evict(eviction))
    books.version += 1


def _open(books: Books, opening: Opening) -> None:
    assert opening.seq not in books.leases, f"sequence {opening.seq} has a lease"
    match = opening.match
    lease = Lease(opening.seq, list(opening.pages), opening.slot, opening.epoch, match.cached_tokens,
                  match.salt, match.cached_tokens // PAGE_TOKENS * PAGE_TOKENS)
    books.leases[opening.seq] = lease
    books.cache.opened(lease, opening)


def _close(books: Books, lease: Lease) -> None:
    fallen = books.cache.release(lease)
    fallen.pages += lease.pages[books.plan.pages_for(lease.shared_tokens):]
    if lease.slot != NO_SLOT:
        fallen.slots.append((lease.slot, lease.epoch))
    fallen.slots += [(tap.slot, tap.epoch) for tap in lease.taps]
    _give_back(books, fallen)


def _give_back(books: Books, fallen: Fallen) -> None:
    _release(books.arena, books.pages.drop(fallen.pages), FrameKind.PAGES)
    for slot, epoch in fallen.slots:
        _release(books.arena, books.slots.drop(slot, epoch), FrameKind.SLOTS)


def _release(arena: Arena, frames: Sequence[FrameId], kind: FrameKind) -> None:
    for frame in frames:
        arena.release(frame, kind)
