"""The bytes of the arena on the device, and the only code that touches them without a layer's view.

    buffer   uint8 [arena_bytes], one allocation for the life of the executor
      page i    bytes [i P,  (i + 1) P)          frame f   bytes [f F, (f + 1) F)
      slot j    bytes [j S', (j + 1) S')

``fill_frames(frames, 0)`` is law L6: memory whose frame changed kind is zeroed before its first use, by the
device that uses it. The same verb with another byte, and its two sisters for a page and a slot, let tests and
evaluations write garbage where nothing may be read, or into what must be read: 0xFF in every byte is NaN in
float32, bfloat16 and float16 alike.

``copy_slots`` and ``copy_pages`` are how a checkpoint becomes the state of a sequence, a shared page that is
partly filled becomes a page of one's own (law L7), and memory moves to empty a frame. All sources of a call
are read before anything is written: a batch may move a into b and b into c.

The buffer is not initialised: a fresh sequence starts its states explicitly, a page is masked beyond what
was written (kernels select, they never multiply with 0), and touching every byte at start would cost the
whole arena in page faults.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weft.memory.plan import ArenaPlan
from weft.runner.parking import park_states, restore_states
from weft.tensor.inputs import LayerCache
from weft.tensor.views import build_layer_caches

Int32s = npt.NDArray[np.int32]

NAN_BYTE = 0xFF


class DeviceArena:
    """``plan.arena_bytes`` of device memory. Raises RuntimeError (torch's) if there is not so much."""

    def __init__(self, plan: ArenaPlan, device: torch.device) -> None:
        self.plan = plan
        self.buffer = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)

    def layer_caches(self, layer_count: int) -> list[LayerCache]:
        plan = self.plan
        return build_layer_caches(
            self.buffer, layer_count=layer_count, page_bytes=plan.page_bytes, page_count=plan.page_count,
            slot_stride_bytes=plan.slot_stride_bytes, slot_count=plan.slot_count, kv_dtype=plan.kv_dtype,
            kv_fields=plan.kv_fields, state_fields=plan.state_fields)

    def fill_frames(self, frames: Sequence[int], byte: int) -> None:
        self._fill(frames, self.plan.frame_bytes, byte)

    def fill_pages(self, pages: Sequence[int], byte: int) -> None:
        self._fill(pages, self.plan.page_bytes, byte)

    def fill_slots(self, slots: Sequence[int], byte: int) -> None:
        self._fill(slots, self.plan.slot_stride_bytes, byte)

    def copy_slots(self, sources: Int32s, destinations: Int32s) -> None:
        """int32 [k] slot ids each; no destination twice."""
        self._copy(sources, destinations, self.plan.slot_stride_bytes)

    def copy_pages(self, sources: Int32s, destinations: Int32s) -> None:
        """int32 [k] page ids each; no destination twice."""
        self._copy(sources, destinations, self.plan.page_bytes)

    def park(self, parks: Int32s) -> None:
        """int32 [k, 1 + pages] of a slot and the pages that its state goes to, in 8 bits."""
        park_states(self.buffer, self.plan, parks)

    def restore(self, restores: Int32s) -> None:
        """int32 [k, 1 + pages] of a slot and the pages that its state comes from."""
        restore_states(self.buffer, self.plan, restores)

    def _copy(self, sources: Int32s, destinations: Int32s, stride_bytes: int) -> None:
        if not sources.size:
            return
        items = self.buffer.numel() // stride_bytes
        assert min(sources.min(), destinations.min()) >= 0, "PAD is copied"
        assert max(sources.max(), destinations.max()) < items, "a copy is outside the arena"
        # Everything in the arena is aligned to 256 bytes: whole words are copied.
        words = self.buffer.view(torch.int64).view(items, stride_bytes // torch.int64.itemsize)
        from_, to = (torch.from_numpy(ids.astype(np.int64)).to(words.device)
                     for ids in (sources, destinations))
        words.index_copy_(0, to, words.index_select(0, from_))

    def _fill(self, items: Sequence[int], stride_bytes: int, byte: int) -> None:
        for item in items:
            assert 0 <= item < self.buffer.numel() // stride_bytes, f"item {item} is not in the arena"
            self.buffer[item * stride_bytes : (item + 1) * stride_bytes].fill_(byte)
