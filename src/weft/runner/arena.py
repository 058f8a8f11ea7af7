"""The bytes of the arena on the device. No other code touches them without a layer's view.

    buffer   uint8 [arena_bytes], one allocation; freed while the engine sleeps (0 bytes), then allocated
    again
      page i    bytes [i P,  (i + 1) P)          frame f   bytes [f F, (f + 1) F)
      slot j    bytes [j S', (j + 1) S')

``zero_frames`` is law L6: memory whose frame changed kind, or was never used, is zero before its first use.

    on a CPU     anonymous memory of the system: zero until the first write, and not resident until the first
                 touch
    elsewhere    zeroed once, when it is allocated: at the rate of memory, before any request waits

Every plan names a frame here before it writes to it; the scripted executor and the simulator check it. So the
first time there is nothing to do; later a frame is zeroed in the step that changes its kind.

``copy_slots`` and ``copy_pages`` turn a snapshot into the state of a sequence. They give a sequence its own copy of a
partly filled shared page (law L7), and move memory to empty a frame. Loads and stores move pages and states from and
to the transfer buffers of a store (``transfers``); on a GPU they run at the same time as the steps.

Items (frames, pages, slots) are named by arrays on the host or by pieces of the step's staging buffer, which
are on the device already. On a GPU each call is one launch (``arena_kernels``), or two for copies whose
destinations are also sources. Elsewhere torch's own operators do the same.

Nothing depends only on law L6. A fresh sequence starts its states explicitly. Kernels mask a page beyond its written
tokens: they select, and never multiply with 0.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.arena_work import WorkKind
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix_store import BufferPlaces
from weft.runner.compressed import compress_kv, compress_states, restore_kv, restore_states
from weft.runner.staging import Staged
from weft.runner.transfers import DeviceTransfers, HostTransfers, Work
from weft.tensor import gpu
from weft.tensor.device import is_remote
from weft.tensor.inputs import LayerCache
from weft.tensor.views import build_layer_caches
from weft.units import BufferId, ceil_div, format_bytes

if TYPE_CHECKING:
    from weft.runner.arena_kernels import CompressionTable
    from weft.runner.compressed_kv_kernels import BlockTable

Int32s = npt.NDArray[np.int32]
Items = Sequence[int] | Int32s | Staged
"""Item ids in the form of their ``WorkKind``."""

NAN_BYTE = 0xFF
_ALIGNED_BYTES = 4096
"""Byte value for tests and evaluations: a number of such bytes is NaN in float32, bfloat16 and float16."""
MOVES_ROOM_BYTES = 8 << 20
"""Bytes of device memory for copies whose destinations are also sources, and for KV between its two forms."""
WORD_BYTES = 8
"""Bytes of a word. Everything in the arena is aligned to 256 bytes, so it is moved by words."""


class DeviceArena:
    """Arena of ``plan.arena_bytes`` of device memory. Raises RuntimeError if the device has less."""

    def __init__(self, plan: ArenaPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self._compression: CompressionTable | None = None
        self._compressed_kv_table: BlockTable | None = None
        self._buffers: BufferPlaces | None = None
        self._transfers: HostTransfers | DeviceTransfers | None = None
        self.allocate()

    def allocate(self) -> None:
        """Allocate all bytes. Earlier views become invalid."""
        size = self.plan.arena_bytes
        if self.device.type == "cpu":
            # An op that meets PAD inside a context, which is a bug of a plan, may read the page before the first one:
            # that must show in the numbers, not end the process. Pages of the usual size: with 2 MiB pages a prompt
            # that begins a frame waits for the system to make room.
            before = ceil_div(self.plan.page_bytes, _ALIGNED_BYTES) * _ALIGNED_BYTES
            self.buffer = _zeros_of_the_system(before + size)[before:]
            self._host: npt.NDArray[np.uint8] | None = self.buffer.numpy()
        else:
            self.buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            self._host = None
        room_bytes = MOVES_ROOM_BYTES if is_remote(self.device) else 0
        self._room = torch.empty(room_bytes // WORD_BYTES, dtype=torch.int64, device=self.device)
        self._never_written: bytearray | None = bytearray(b"\1") * self.plan.frame_count
        if self._buffers is not None:
            self.attach(self._buffers)

    def attach(self, buffers: BufferPlaces) -> None:
        """Attach a store's ``buffers``, whose loads and stores may come from now on."""
        self._buffers = buffers
        form = DeviceTransfers if is_remote(self.device) else HostTransfers
        self._transfers = form(self.plan, self.buffer, buffers)

    @property
    def device_transfers(self) -> DeviceTransfers:
        """Transfers of an arena that the host only reaches by copies."""
        assert isinstance(self._transfers, DeviceTransfers), "a plan loads or stores without a store"
        return self._transfers

    def settle_loads(self, keys: Collection[Any], pages: Items, slots: Items) -> Work:
        """Call ``DeviceTransfers.settle`` on a device; on a CPU, return nothing to do."""
        if not isinstance(self._transfers, DeviceTransfers):
            return ()
        return self._transfers.settle(keys, _on_host(pages), _on_host(slots))

    def follow_loads(self, buffer: BufferId) -> None:
        """Call ``DeviceTransfers.follow`` on a device; on a CPU, do nothing."""
        if isinstance(self._transfers, DeviceTransfers):
            self._transfers.follow(buffer)

    def transfers_done(self, step: int) -> bool:
        """Return whether all loads and stores up to ``step``, which is computed, have ended. Never waits."""
        return not isinstance(self._transfers, DeviceTransfers) or self._transfers.are_done(step)

    def await_transfers(self) -> None:
        """Wait until no load and no store is under way."""
        if isinstance(self._transfers, DeviceTransfers):
            self._transfers.wait()

    def release(self) -> None:
        """Free the bytes, once no view of them is left and no transfer is under way. Idempotent."""
        self.await_transfers()
        self._transfers = None
        self._room = torch.empty(0, dtype=torch.int64, device=self.device)
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._host = self._never_written = None

    def layer_caches(self, layer_count: int) -> list[LayerCache]:
        plan = self.plan
        return build_layer_caches(
            self.buffer,
            layer_count=layer_count,
            page_bytes=plan.page_bytes,
            page_count=plan.page_count,
            slot_stride_bytes=plan.slot_stride_bytes,
            slot_count=plan.slot_count,
            kv_dtype=plan.kv_dtype,
            kv_layout=plan.kv_layout,
            kv_fields=plan.kv_fields,
            state_fields=plan.state_fields,
        )

    def perform(self, kind: WorkKind, ids: Items) -> None:
        """Perform one kind of a step's arena work; ``ids`` has the form that ``WorkKind`` says."""
        match kind:
            case WorkKind.ZERO_FRAMES:
                self.zero_frames(ids)
            case WorkKind.RESTORE_STATES:
                self.restore(ids)
            case WorkKind.RESTORE_KV:
                self.restore_kv(ids)
            case WorkKind.COMPRESS_STATES:
                self.compress(ids)
            case WorkKind.COMPRESS_KV:
                self.compress_kv(ids)
            case WorkKind.COPY_SLOTS:
                self.copy_slots(*_both(ids))
            case WorkKind.COPY_PAGES:
                self.copy_pages(*_both(ids))
            case _:
                assert isinstance(self._transfers, HostTransfers), "a plan loads or stores without a store"
                self._transfers.perform(kind, _on_host(ids))

    def zero_frames(self, frames: Items) -> None:
        """Zero ``frames``. From then on steps may write to them."""
        never = self._never_written
        if never is None:
            self._fill(frames, self.plan.frame_bytes, 0)
            return
        written = []
        for frame in _on_host(frames).tolist():
            assert frame >= 0, "PAD is zeroed"
            if never[frame]:
                never[frame] = False
            else:
                written.append(frame)
        if written:
            self._fill(written if self._host is not None else frames, self.plan.frame_bytes, 0)

    # On a CPU zeros over zeros would bring every page of the frame at once, in the middle of a step. On a GPU the
    # ids are on the device already: all frames are zeroed, if one was used.

    def fill(self, items: Items, stride_bytes: int, byte: int) -> None:
        """Fill frames, pages or slots, by their size. A fill writes where no plan has been: from then on no frame
        counts as never written.
        """
        self._never_written = None
        self._fill(items, stride_bytes, byte)

    def copy_slots(self, sources: Items, destinations: Items) -> None:
        """Copy slots, by [k] slot ids each; no destination twice."""
        self._copy(sources, destinations, self.plan.slot_stride_bytes)

    def copy_pages(self, sources: Items, destinations: Items) -> None:
        """Copy pages, by [k] page ids each; no destination twice."""
        self._copy(sources, destinations, self.plan.page_bytes)

    def compress(self, states: Items) -> None:
        """Compress states to 8 bits. ``states`` [k, 1 + pages]: a slot and the pages that its state goes to."""
        self._compress(states, restore=False)

    def restore(self, state_restores: Items) -> None:
        """Restore compressed states. ``state_restores`` [k, 1 + pages]: a slot and the pages that its state comes
        from.
        """
        self._compress(state_restores, restore=True)

    def compress_kv(self, records: Items) -> None:
        """Compress pages of KV. ``records`` [k, 4]: a page, the two pages that its record goes to, and the byte at
        which it begins there.
        """
        self._compress_kv(records, restore=False)

    def restore_kv(self, state_restores: Items) -> None:
        """Restore pages of KV. ``state_restores`` [k, 4]: a page, and the position of its record."""
        self._compress_kv(state_restores, restore=True)

    def _compress_kv(self, records: Items, *, restore: bool) -> None:
        host = _on_host(records)
        if not host.size:
            return
        assert (host >= 0).all(), "PAD is compressed"
        assert host[:, :3].max() < self.plan.page_count, "KV is compressed outside the arena"
        records_K4 = self._on_device(records)
        if not gpu.fits(self.buffer):
            (restore_kv if restore else compress_kv)(self.buffer, self.plan, records_K4)
            return
        from weft.runner import compressed_kv_kernels as kv_kernels

        if self._compressed_kv_table is None:
            self._compressed_kv_table = kv_kernels.BlockTable(self.plan, self.buffer.device)
        kv_kernels.compress(
            self.buffer, self.plan, self._compressed_kv_table, records_K4, room=self._room, restore=restore
        )

    def _compress(self, states: Items, *, restore: bool) -> None:
        host = _on_host(states)
        if not host.size:
            return
        assert host.shape[1] == 1 + self.plan.compressed_pages, "a compressed state of another geometry"
        assert (host >= 0).all(), "PAD is compressed"
        states_KP = self._on_device(states)
        if not gpu.fits(self.buffer):
            (restore_states if restore else compress_states)(self.buffer, self.plan, states_KP)
            return
        from weft.runner import arena_kernels

        if self._compression is None:
            self._compression = arena_kernels.CompressionTable(self.plan, self.buffer.device)
        arena_kernels.compress(self.buffer, self.plan, self._compression, states_KP, restore=restore)

    def _copy(self, sources: Items, destinations: Items, stride_bytes: int) -> None:
        from_, to = _on_host(sources), _on_host(destinations)
        if not from_.size:
            return
        items = self.buffer.numel() // stride_bytes
        assert min(from_.min(), to.min()) >= 0, "PAD is copied"
        assert max(from_.max(), to.max()) < items, "a copy is outside the arena"
        words = self.buffer.view(torch.int64)
        from_K, to_K = self._on_device(sources), self._on_device(destinations)
        if gpu.fits(words):
            from weft.runner import arena_kernels

            arena_kernels.copy(
                words, from_K, to_K, stride_bytes // WORD_BYTES, room=self._room if np.isin(to, from_).any() else None
            )
            return
        by_item = words.view(items, stride_bytes // WORD_BYTES)
        by_item.index_copy_(0, to_K, by_item.index_select(0, from_K))

    # All sources are read before any is written: a batch may move a into b and b into c.

    def _fill(self, items: Items, stride_bytes: int, byte: int) -> None:
        filled = _on_host(items).tolist()
        if not filled:
            return
        assert min(filled) >= 0, "PAD is filled"
        assert max(filled) < self.plan.arena_bytes // stride_bytes, f"{max(filled)} is not in the arena"
        if gpu.fits(self.buffer):
            from weft.runner import arena_kernels

            arena_kernels.fill(self.buffer.view(torch.int64), self._on_device(items), stride_bytes // WORD_BYTES, byte)
            return
        target = self.buffer if self._host is None else self._host
        for item in filled:
            target[item * stride_bytes : (item + 1) * stride_bytes] = byte

    def _on_device(self, items: Items) -> torch.Tensor:
        """Return ``items`` as int64 on the device."""
        if isinstance(items, Staged):
            return items.device
        return torch.from_numpy(_on_host(items).astype(np.int64)).to(self.buffer.device)


def note_written(arena: DeviceArena, end_bytes: int) -> None:
    """Record that the frames before byte ``end_bytes`` are not zero any more."""
    if arena._never_written is not None:
        count = min(ceil_div(end_bytes, arena.plan.frame_bytes), arena.plan.frame_count)
        arena._never_written[:count] = bytes(count)


def warm(arena: DeviceArena) -> None:
    """Run every kernel of arena work once, so that none compiles inside a request. The bytes of the first pages and
    slots change, so call it before the arena's first use.
    """
    plan, circle = arena.plan, [[0, 1], [1, 0]]
    note_written(arena, max(plan.frame_bytes, 2 * plan.slot_stride_bytes, 2 * plan.page_bytes))
    arena.zero_frames([0])
    for stride, copy in ((plan.slot_stride_bytes, arena.copy_slots), (plan.page_bytes, arena.copy_pages)):
        if stride and plan.arena_bytes // stride > 1:
            copy([0], [1])
            copy(*circle)
    if plan.compressed_pages:
        state = np.zeros((1, 1 + plan.compressed_pages), np.int32)
        arena.compress(state)
        arena.restore(state)
    if plan.compressed_kv_bytes:
        record = np.zeros((1, 4), np.int32)
        arena.compress_kv(record)
        arena.restore_kv(record)


def _both(copies: Items) -> tuple[Items, Items]:
    """Return sources and destinations of int32 [2, k]."""
    if isinstance(copies, Staged):
        return copies.row(0), copies.row(1)
    sources, destinations = np.asarray(copies)
    return sources, destinations


def _on_host(items: Items) -> npt.NDArray[Any]:
    return items.host if isinstance(items, Staged) else np.asarray(items)


def _zeros_of_the_system(size: int) -> torch.Tensor:
    """Return uint8 [size]: anonymous memory, which every system hands out as zeros. An allocator reuses freed memory,
    which is not zero.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"the system does not have {format_bytes(size)} of memory for the arena") from error
    return torch.frombuffer(memory, dtype=torch.uint8)
