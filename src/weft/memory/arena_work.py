"""Work on the arena: operations of a step on stored bytes before it computes, and their one order.

    committed memory -> zero_frames -> loads -> restores -> compressions -> copies -> runs -> stores
                       frames that    from     states, KV  states, KV      slots,    of the  into
                       changed kind   buffers                              pages     step    buffers

A transaction asks for this work, the reservation and the step plan carry it, and an arena performs it: the
device's (``weft.runner.arena``), or the scripted one of the tests. All of them take the order from
``ArenaWork.ordered``, so the order that is checked is the order that ships.

* Zeros come first (law L6), then loads: both write pages and slots that the transaction has just handed out.
* Restores come before compressions. A restore only reads codes that older steps wrote. A compression writes
  codes, into free pages or over the KV that it encodes, and its source holds nothing afterwards. The
  commit uses the same order, so an id means the same bytes in both.
* Copies come last. A copy reads a snapshot, a shared page or a running slot. The transaction never compresses the
  snapshot that it opens on, and the destination of a copy is new. So no earlier kind writes the source of a copy (L7).
* Within a kind, all sources are read before any destination is written, except for KV records. Those go row by row,
  because each row may overwrite bytes that an earlier row has read.
* Stores come after the runs. A page that the step evicts is free from the next transaction on, so its bytes
  are still in place. A page that the step compresses in place is never stored by the same step.

To add a kind, add a member of ``WorkKind``, a value class and a field here, and the method of each arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.memory.prefix_store import KvRows
from weft.memory.values import NodeId
from weft.units import PAD, BufferId, FrameId, PageId, SlotId

Int32s = npt.NDArray[np.int32]


class WorkKind(Enum):
    """Kinds of work. The value is the name of the field of ``ArenaWork``. The ids of each kind are int32:

    ``ZERO_FRAMES``                         [k]            frames
    ``RESTORE_STATES``, ``COMPRESS_STATES`` [k, 1 + pages] a slot and the pages of its compressed state
    ``RESTORE_KV``, ``COMPRESS_KV``         [k, 4]         a page, the first and last page of its record
                                                           (perhaps the same), and the byte of the first
                                                           page where the record begins
    ``COPY_SLOTS``, ``COPY_PAGES``          [2, k]         sources, destinations; no destination twice
    ``LOAD_PAGES``, ``STORE_PAGES``         [k, 3]         a page, a transfer buffer, its place in there
    ``LOAD_STATES``, ``STORE_STATES``       [k, 2]         a slot, a transfer buffer
    """

    ZERO_FRAMES = "zero_frames"
    LOAD_PAGES = "page_loads"
    LOAD_STATES = "state_loads"
    RESTORE_STATES = "state_restores"
    RESTORE_KV = "kv_restores"
    COMPRESS_STATES = "state_compressions"
    COMPRESS_KV = "kv_compressions"
    COPY_SLOTS = "slot_copies"
    COPY_PAGES = "page_copies"
    STORE_PAGES = "page_stores"
    STORE_STATES = "state_stores"


class StoredSizes(Protocol):
    """Bytes of each form in which the arena stores KV and states (``ArenaPlan``)."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def compressed_bytes(self) -> int: ...
    @property
    def compressed_kv_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """A copy of all bytes of slot ``src`` to slot ``dst``. A run that starts from ``dst`` is not fresh."""

    src: SlotId
    dst: SlotId


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy of all bytes of page ``src`` to page ``dst``."""

    src: PageId
    dst: PageId


@dataclass(frozen=True, slots=True)
class CompressState:
    """A write of the state in ``slot``, the snapshot of ``node``, to ``pages`` in 8 bits."""

    node: NodeId
    slot: SlotId
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class RestoreState:
    """A write of the state compressed in ``pages`` to ``slot``. The run of ``slot`` is not fresh."""

    pages: tuple[PageId, ...]
    slot: SlotId


class KvForm(NamedTuple):
    """Bytes of a page of KV, exact and compressed."""

    page_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class CompressKv:
    """A compression of the KV of ``node`` in ``pages`` into the first ``compressed_count`` of them. The others are free
    from the next transaction on."""

    node: NodeId
    pages: tuple[PageId, ...]
    compressed_count: int
    form: KvForm

    @property
    def compressed(self) -> tuple[PageId, ...]:
        """The pages that hold the records afterwards."""
        return self.pages[: self.compressed_count]

    @property
    def ids(self) -> Int32s:
        """Int32 [records, 4], see ``WorkKind``, in an order that works in place."""
        return _record_ids(self.pages, self.compressed, 0, self.form)


@dataclass(frozen=True, slots=True)
class RestoreKv:
    """A write of the compressed KV of ``node``, which begins at byte ``skip_bytes`` of ``compressed``, to ``pages``.
    NO_NODE: this step loads it, for a lease.

    ``pages`` are most of ``compressed`` and some new ones. The rest of ``compressed`` is free from the next
    transaction on."""

    node: NodeId
    compressed: tuple[PageId, ...]
    skip_bytes: int
    pages: tuple[PageId, ...]
    form: KvForm

    @property
    def ids(self) -> Int32s:
        """Ids as ``CompressKv.ids``, the last record first."""
        return _record_ids(self.pages, self.compressed, self.skip_bytes, self.form)[::-1]


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """A transfer of ``pages`` and the same number of pages of transfer buffer ``buffer`` from its page ``first`` on:
    the bytes of one side are written to the other."""

    buffer: BufferId
    first: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """A transfer of the state in ``slot`` and the state of transfer buffer ``buffer``."""

    buffer: BufferId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class SnapshotLoad:
    """A snapshot in a transfer buffer: ``buffer`` holds the KV of [``start``, ``position``), ``start`` a multiple of a
    page, and the state after ``position`` tokens. ``exact``: nothing of it was ever compressed. ``rows``: rows of its
    KV, and their forms. ``state_row``: the row where a compressed state begins; PAD for an exact one."""

    buffer: BufferId
    start: int
    position: int
    exact: bool
    rows: tuple[KvRows, ...]
    state_row: int = PAD


@dataclass(frozen=True, slots=True)
class ArenaWork:
    """The arena work of one step, by kind. ``zero_frames``: law L6."""

    zero_frames: tuple[FrameId, ...] = ()
    page_loads: tuple[PageTransfer, ...] = ()
    state_loads: tuple[StateTransfer, ...] = ()
    state_restores: tuple[RestoreState, ...] = ()
    kv_restores: tuple[RestoreKv, ...] = ()
    state_compressions: tuple[CompressState, ...] = ()
    kv_compressions: tuple[CompressKv, ...] = ()
    slot_copies: tuple[SlotCopy, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    page_stores: tuple[PageTransfer, ...] = ()
    state_stores: tuple[StateTransfer, ...] = ()

    def ordered(self) -> Iterator[tuple[WorkKind, Int32s]]:
        """Yield the kinds that come before the runs and have work, with their ids, in the one order."""
        if self.zero_frames:
            yield WorkKind.ZERO_FRAMES, np.asarray(self.zero_frames, dtype=np.int32)
        if self.page_loads:
            yield WorkKind.LOAD_PAGES, _page_transfer_ids(self.page_loads)
        if self.state_loads:
            yield WorkKind.LOAD_STATES, _state_transfer_ids(self.state_loads)
        if self.state_restores:
            yield WorkKind.RESTORE_STATES, _state_ids(self.state_restores)
        if self.kv_restores:
            yield WorkKind.RESTORE_KV, np.concatenate([restore.ids for restore in self.kv_restores])
        if self.state_compressions:
            yield WorkKind.COMPRESS_STATES, _state_ids(self.state_compressions)
        if self.kv_compressions:
            yield WorkKind.COMPRESS_KV, np.concatenate([compression.ids for compression in self.kv_compressions])
        if self.slot_copies:
            yield WorkKind.COPY_SLOTS, _copy_ids(self.slot_copies)
        if self.page_copies:
            yield WorkKind.COPY_PAGES, _copy_ids(self.page_copies)

    @property
    def stores(self) -> bool:
        """Whether pages or a state go into a transfer buffer."""
        return bool(self.page_stores or self.state_stores)

    def after_runs(self) -> Iterator[tuple[WorkKind, Int32s]]:
        """Yield the kinds that come after the runs and have work, with their ids."""
        if self.page_stores:
            yield WorkKind.STORE_PAGES, _page_transfer_ids(self.page_stores)
        if self.state_stores:
            yield WorkKind.STORE_STATES, _state_transfer_ids(self.state_stores)

    def pages_written(self) -> set[PageId]:
        """Return the pages that get contents before the runs; zeroed frames are not counted."""
        return {copy.dst for copy in self.page_copies}.union(
            *(load.pages for load in self.page_loads),
            *(compression.pages for compression in self.state_compressions),
            *(restore.pages for restore in self.kv_restores),
            *(compression.compressed for compression in self.kv_compressions),
        )

    @property
    def writes_pages(self) -> bool:
        """Whether ``pages_written`` has any."""
        return bool(
            self.page_copies or self.page_loads or self.state_compressions or self.kv_restores or self.kv_compressions
        )

    def moved_bytes(self, sizes: StoredSizes) -> int:
        """Return the bytes that are read or written: both forms of compressed or restored data, twice the bytes of
        copies, and ``transferred_bytes``. Zeros are not counted."""
        states = len(self.state_compressions) + len(self.state_restores)
        records = sum(len(compression.pages) for compression in self.kv_compressions) + sum(
            len(restore.pages) for restore in self.kv_restores
        )
        return (
            self.transferred_bytes(sizes)
            + states * (sizes.slot_bytes + sizes.compressed_bytes)
            + records * (sizes.page_bytes + sizes.compressed_kv_bytes)
            + 2 * len(self.slot_copies) * sizes.slot_bytes
            + 2 * len(self.page_copies) * sizes.page_bytes
        )

    def transferred_bytes(self, sizes: StoredSizes) -> int:
        """Return the bytes that are loaded or stored: they cross the link between a device and its host."""
        return (
            sum(len(transfer.pages) for transfer in (*self.page_loads, *self.page_stores)) * sizes.page_bytes
            + (len(self.state_loads) + len(self.state_stores)) * sizes.slot_bytes
        )


NO_WORK = ArenaWork()


def _state_ids(states: Sequence[CompressState] | Sequence[RestoreState]) -> Int32s:
    return np.asarray([(state.slot, *state.pages) for state in states], dtype=np.int32)


def _copy_ids(copies: Sequence[SlotCopy] | Sequence[PageCopy]) -> Int32s:
    return np.asarray([[copy.src for copy in copies], [copy.dst for copy in copies]], dtype=np.int32)


def _page_transfer_ids(transfers: Sequence[PageTransfer]) -> Int32s:
    return np.concatenate(
        [
            np.stack(
                [
                    np.asarray(transfer.pages, dtype=np.int32),
                    np.full(len(transfer.pages), transfer.buffer, dtype=np.int32),
                    transfer.first + np.arange(len(transfer.pages), dtype=np.int32),
                ],
                axis=1,
            )
            for transfer in transfers
        ]
    )


def _state_transfer_ids(transfers: Sequence[StateTransfer]) -> Int32s:
    return np.asarray([(transfer.slot, transfer.buffer) for transfer in transfers], dtype=np.int32)


def _record_ids(pages: Sequence[PageId], compressed: Sequence[PageId], skip_bytes: int, form: KvForm) -> Int32s:
    start = skip_bytes + np.arange(len(pages), dtype=np.int64) * form.record_bytes
    lies_on = np.asarray(compressed, dtype=np.int64)
    first, last = start // form.page_bytes, (start + form.record_bytes - 1) // form.page_bytes
    columns = (np.asarray(pages, dtype=np.int64), lies_on[first], lies_on[last], start % form.page_bytes)
    return np.stack(columns, axis=1).astype(np.int32)
