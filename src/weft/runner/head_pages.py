"""Pages that hold no keys of the model's own head yet, and must be zero in its field before it reads them.

    handed out          pending: the head may be off, and then nothing is written
    the head runs       all pending pages get zeros first (law L10: never the keys of another sequence)
    compressed, stored  the same, as whole pages leave memory

A page id says nothing for long. What is pending follows the bytes:

    a frame is claimed              its pages are no longer pending: the bytes are states now, or pages that
                                    will be handed out again
    contents arrive in a page       not pending: a compressed state, a restored record or a load fills it
    a pending page is copied        the copy is pending as well

Zeros come before the arena work of their plan, so contents that arrive in the same plan stay.

Integers only: ``runner.mtp`` writes the zeros.

Rejected: zeros when a page is handed out (a launch in many steps, for a head that is off); pending ids
alone (zeros fell into the running states of a frame that had changed kind).
"""

from __future__ import annotations

from weft.schedule.plan import StepPlan


class HeadPages:
    """``pages_per_frame``: of the arena."""

    def __init__(self, pages_per_frame: int) -> None:
        self._pages_per_frame = pages_per_frame
        self._pending: set[int] = set()

    def admit(self, plan: StepPlan) -> list[int]:
        """The pages to zero before the arena work of ``plan``. Called for every plan, in order."""
        reservation, work = plan.reservation, plan.arena_work
        if not self._pending and not reservation.pages:
            return []
        for claim in reservation.frames:
            first = claim.frame * self._pages_per_frame
            self._pending.difference_update(range(first, first + self._pages_per_frame))
        if plan.mtp_drafts is not None or work.kv_compressions or work.page_stores:
            due = self._pending.union(reservation.pages)
            self._pending = set()
            return sorted(due)
        if not work.writes_pages:
            self._pending.update(reservation.pages)
            return []
        copied = {copy.dst for copy in work.page_copies if copy.src in self._pending}
        self._pending.update(reservation.pages)
        self._pending -= work.pages_written()
        self._pending |= copied
        return []
