"""What 8 bits of state, and 8 or 4 of KV, mean for answers: the shipped models recall as before when what
they begin on was compressed.

As in ``test_recall_skill`` each prompt is computed in chunks that end at a border in the middle of the text.
There the accumulators of its state go to codes and back, as they do when a snapshot is compressed and a
sequence begins on it. The states-only model has no other memory: what rounding cost would show in it first.
Control: the same codes put back with rows for columns, and it forgets. (Scales that are wrong make it forget
little: what it reads is normed. Those show in logits, in ``test_engine_compression``.)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.oracle.test_recall_skill import EMBEDDED, STATES_ONLY, Exam, codes_episodes, recall_episodes
from weft.memory.arena_work import CompressKv, KvForm
from weft.memory.frames.plan import with_compressed_kv
from weft.memory.values import NodeId
from weft.runner.compressed import compress_kv, restore_kv
from weft.schedule.plan import StepPlan
from weft.spec import COMPRESSED_KV_DTYPES, CompressedKvName
from weft.tensor.few_bits import decode_state, encode_state
from weft.tensor.layout import DTYPES
from weft.tensor.views import state_view
from weft.units import PAGE_TOKENS, PageId, ceil_div


class CompressedExam(Exam):
    """``turned``: rows come back as columns."""

    def __init__(self, directory: Path, border: int, *, turned: bool = False) -> None:
        super().__init__(directory, border)
        self._turned = turned
        self.compressed_count = 0

    def _before_step(self, plan: StepPlan) -> None:
        if plan.run_count == 0 or plan.starts[0] != self._border:
            return
        self.compressed_count += 1
        arena = self._arena
        for field in (field for field in arena.state_fields if field.name == "recurrent"):
            states = state_view(
                self._executor.arena.buffer,
                slot_stride_bytes=arena.slot_stride_bytes,
                slot_count=arena.slot_count,
                offset_bytes=field.offset_bytes,
                shape=field.shape,
                dtype=DTYPES[field.dtype],
            )
            state = states[int(plan.slots[0])]
            codes, scales = torch.empty_like(state, dtype=torch.int8), torch.empty(state.shape[:-1])
            encode_state(state, codes, scales)
            decoded = decode_state(codes, scales, state.dtype)
            state.copy_(decoded.mT if self._turned else decoded)


class CompressedKvExam(Exam):
    """All KV before the border goes to ``dtype`` and back, in place. ``lost``: each page comes back as the
    first one."""

    def __init__(self, directory: Path, border: int, dtype: CompressedKvName, *, lost: bool = False) -> None:
        super().__init__(directory, border)
        self._dtype = dtype
        self._lost = lost
        self.compressed_count = 0

    def _before_step(self, plan: StepPlan) -> None:
        super()._before_step(plan)
        if plan.run_count == 0 or plan.starts[0] != self._border:
            return
        self.compressed_count += 1
        arena, buffer = with_compressed_kv(self._arena, self._dtype), self._executor.arena.buffer
        pages = tuple(PageId(page) for page in self._pages[: self._border // PAGE_TOKENS])
        form = KvForm(arena.page_bytes, arena.compressed_kv_bytes)
        compressed_count = ceil_div(len(pages) * form.record_bytes, form.page_bytes)
        rows = torch.from_numpy(CompressKv(NodeId(0), pages, compressed_count, form).ids.astype(np.int64))
        compress_kv(buffer, arena, rows)
        if self._lost:
            rows[:, 1:] = rows[0, 1:].clone()
        restore_kv(buffer, arena, rows.flip(0))


@pytest.mark.parametrize("dtype", COMPRESSED_KV_DTYPES)
def test_the_embedded_model_recalls_from_compressed_kv(dtype: CompressedKvName) -> None:
    exam = CompressedKvExam(EMBEDDED, 384, dtype)
    assert exam.accuracy(recall_episodes(exam), 20) >= 0.95
    assert exam.compressed_count == 20


@pytest.mark.parametrize("dtype", COMPRESSED_KV_DTYPES)
def test_the_embedded_model_forgets_when_pages_do_not_come_back(dtype: CompressedKvName) -> None:
    exam = CompressedKvExam(EMBEDDED, 384, dtype, lost=True)
    assert exam.accuracy(recall_episodes(exam), 10) < 0.5


def test_the_embedded_model_recalls_from_compressed_states() -> None:
    exam = CompressedExam(EMBEDDED, 384)
    assert exam.accuracy(recall_episodes(exam), 20) >= 0.95
    assert exam.compressed_count == 20


def test_the_states_only_model_recalls_from_compressed_states() -> None:
    exam = CompressedExam(STATES_ONLY, 128)
    assert exam.accuracy(codes_episodes(exam), 40) >= 0.95
    assert exam.compressed_count == 40


def test_the_states_only_model_forgets_when_codes_come_back_elsewhere() -> None:
    exam = CompressedExam(STATES_ONLY, 128, turned=True)
    assert exam.accuracy(codes_episodes(exam), 30) < 0.3
