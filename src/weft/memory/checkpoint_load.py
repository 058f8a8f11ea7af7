"""The arena work of a load: exact rows become pages, compressed rows are loaded and unpacked in place.

    buffer   rows of pages:  | exact KV | int8 KV, side by side | exact KV | compressed state |
                                  |          |                       |             |
    lease    pages            [ 17 4 90 ]  [ 33 8 ] --restore-->  [ 12 ]      [ 60 61 ] --restore--> slot
                                            [ 8 51 33 70 ]

Loads come before restores in a step. So codes are copied into some of the pages that the lease gets. The
same step unpacks them there, as ``PackedPages`` does for KV of the tree. A compressed state takes pages of
the lease too. These *spare* pages hold nothing once the step is computed. They lie behind those of the
tokens, and the close of the lease frees them.

``spare_pages`` is what ``plan_load`` needs beyond the pages of the tokens. Nothing is written here.

Rejected: a load in two steps, one for the codes and one to unpack them (a lease whose pages change their
meaning between two plans); unpacking on the host (the link would move two to four times the bytes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.memory.arena_work import (
    CheckpointLoad,
    KvForm,
    PageTransfer,
    RestoreKv,
    RestoreState,
    StateTransfer,
)
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.compressed_kv import PackedPages
from weft.memory.prefix_store import EXACT_FORM, KvRows
from weft.memory.values import NO_NODE, NO_SLOT
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId, ceil_div, pages_for


@dataclass(slots=True)
class LoadWork:
    """``pages``: those of the lease in the order of their tokens, the spare ones last."""

    pages: list[PageId] = field(default_factory=list)
    page_loads: list[PageTransfer] = field(default_factory=list)
    state_loads: list[StateTransfer] = field(default_factory=list)
    kv_restores: list[RestoreKv] = field(default_factory=list)
    state_restores: list[RestoreState] = field(default_factory=list)


def spare_pages(load: CheckpointLoad, plan: ArenaPlan) -> int:
    """Pages that a lease of ``load`` takes besides those of its tokens: for a compressed state, and one for
    compressed rows of which a part is cached."""
    compressed = any(rows.form != EXACT_FORM for rows in load.rows)
    return compressed + (plan.compressed_pages if load.state_row != PAD else 0)


def plan_load(load: CheckpointLoad, plan: ArenaPlan, pages: Sequence[PageId], slot: SlotId,
              first: int) -> LoadWork:
    """``pages``: one for each 16 tokens from position ``first`` on, and the spare ones."""
    work, pool = LoadWork(), deque(pages)
    if plan.pages_per_frame:
        for rows in load.rows:
            if rows.end > first:
                _plan_rows(work, load, rows, max(first, rows.start), plan, pool)
    if load.state_row != PAD:
        state_pages = tuple(pool.popleft() for _ in range(plan.compressed_pages))
        work.page_loads.append(PageTransfer(load.buffer, load.state_row, state_pages))
        work.state_restores.append(RestoreState(state_pages, slot))
        pool += state_pages
    elif slot != NO_SLOT:
        work.state_loads.append(StateTransfer(load.buffer, slot))
    work.pages += pool
    return work


def _plan_rows(work: LoadWork, load: CheckpointLoad, rows: KvRows, begin: int, plan: ArenaPlan,
               pool: deque[PageId]) -> None:
    passed, count = (begin - rows.start) // PAGE_TOKENS, pages_for(rows.end) - begin // PAGE_TOKENS
    if rows.form == EXACT_FORM:
        pages = tuple(pool.popleft() for _ in range(count))
        work.page_loads.append(PageTransfer(load.buffer, rows.first + passed, pages))
        work.pages += pages
        return
    form = KvForm(plan.page_bytes, plan.compressed_kv_bytes)
    row, skip_bytes = divmod(passed * form.record_bytes, form.page_bytes)
    packed = [pool.popleft() for _ in range(ceil_div(skip_bytes + count * form.record_bytes,
                                                     form.page_bytes))]
    run = PackedPages(packed, 0, skip_bytes, 0, count)
    extra = [pool.popleft() for _ in range(run.missing)]
    unpacked = run.unpack_into(extra, form)
    work.page_loads.append(PageTransfer(load.buffer, rows.first + row, tuple(packed)))
    work.kv_restores.append(RestoreKv(NO_NODE, tuple(packed), skip_bytes, unpacked, form))
    work.pages += unpacked
    pool += [page for page in (*packed, *extra) if page not in set(unpacked)]
