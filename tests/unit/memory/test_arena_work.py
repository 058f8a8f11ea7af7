"""Arena work: one order, and ids in the form that a device takes."""

from __future__ import annotations

from dataclasses import fields

from tests.support.checkers import slots_written
from weft.memory.arena_work import (
    NO_WORK,
    ArenaWork,
    CompressKv,
    CompressState,
    KvForm,
    PageCopy,
    PageTransfer,
    RestoreKv,
    RestoreState,
    SlotCopy,
    StateTransfer,
    WorkKind,
)
from weft.memory.values import NO_NODE
from weft.units import BufferId, FrameId, PageId, SlotId

PAGES = tuple(map(PageId, range(10, 16)))
FORM = KvForm(page_bytes=256, record_bytes=128)
EVERY_KIND = ArenaWork(
    zero_frames=(FrameId(3),),
    page_loads=(PageTransfer(BufferId(7), 2, PAGES[:2]),),
    state_loads=(StateTransfer(BufferId(7), SlotId(6)),),
    state_restores=(RestoreState(PAGES[:2], SlotId(1)),),
    kv_restores=(RestoreKv(NO_NODE, PAGES[:1], 0, PAGES[:2], FORM),),
    state_compressions=(CompressState(NO_NODE, SlotId(2), PAGES[2:4]),),
    kv_compressions=(CompressKv(NO_NODE, PAGES[4:], 1, FORM),),
    slot_copies=(SlotCopy(SlotId(1), SlotId(4)), SlotCopy(SlotId(2), SlotId(5))),
    page_copies=(PageCopy(PAGES[0], PAGES[5]),),
    page_stores=(PageTransfer(BufferId(8), 0, PAGES[3:5]), PageTransfer(BufferId(9), 4, PAGES[:1])),
    state_stores=(StateTransfer(BufferId(8), SlotId(3)),),
)


def test_every_kind_comes_once_and_in_the_order_of_the_fields() -> None:
    kinds = [kind.value for kind, _ in (*EVERY_KIND.ordered(), *EVERY_KIND.after_runs())]
    assert kinds == [field.name for field in fields(ArenaWork)]
    assert sorted(kinds) == sorted(kind.value for kind in WorkKind)


def test_a_kind_without_work_is_left_out() -> None:
    assert list(NO_WORK.ordered()) == list(NO_WORK.after_runs()) == []
    [(kind, _)] = ArenaWork(page_copies=EVERY_KIND.page_copies).ordered()
    assert kind is WorkKind.COPY_PAGES


def test_ids_have_the_form_of_their_kind() -> None:
    every = (*EVERY_KIND.ordered(), *EVERY_KIND.after_runs())
    assert {kind.value: ids.tolist() for kind, ids in every} == {
        "zero_frames": [3],
        "page_loads": [[10, 7, 2], [11, 7, 3]],
        "state_loads": [[6, 7]],
        "state_restores": [[1, 10, 11]],
        "kv_restores": [[11, 10, 10, 128], [10, 10, 10, 0]],
        "state_compressions": [[2, 12, 13]],
        "kv_compressions": [[14, 14, 14, 0], [15, 14, 14, 128]],
        "slot_copies": [[1, 2], [4, 5]],
        "page_copies": [[10], [15]],
        "page_stores": [[13, 8, 0], [14, 8, 1], [10, 9, 4]],
        "state_stores": [[3, 8]],
    }


def test_what_is_written_is_every_destination() -> None:
    assert EVERY_KIND.pages_written() == {10, 11, 12, 13, 14, 15}
    assert slots_written(EVERY_KIND) == {1, 4, 5, 6}
