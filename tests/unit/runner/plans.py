"""Step plans written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.memory.arena_work import ArenaWork, PageCopy, SlotCopy
from weft.memory.reservation import Reservation
from weft.request import SamplingParams
from weft.schedule.plan import Admission, StepPlan, Tap
from weft.units import FrameId, PageId, RowId, SeqId, SlotId

NOTHING = Reservation(version=0, frames=(), pages=(), slots=(), opened=(), extended=(), closed=())


def admission(row: int, tokens: Sequence[int], prompt_tokens: int | None = None, **sampling: object) -> Admission:
    params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
    return Admission(
        row=RowId(row),
        seq=SeqId(row),
        tokens=np.array(tokens, np.int32),
        prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
        sampling=params,
        seed=0,
        stop_ids=(),
    )


def plan(
    runs: Sequence[tuple[int, int, Sequence[int], int, bool]] = (),
    *,
    decode_count: int = 0,
    fresh: Sequence[bool] | None = None,
    rows_cleared: Sequence[int] = (),
    admissions: Sequence[Admission] = (),
    table_writes: Sequence[tuple[int, int, int]] = (),
    zero_frames: Sequence[int] = (),
    taps: Sequence[Tap] = (),
    prompt_logprob_runs: Sequence[int] = (),
    slot_copies: Sequence[tuple[int, int]] = (),
    page_copies: Sequence[tuple[int, int]] = (),
    table_patches: Sequence[tuple[int, int, int]] = (),
) -> StepPlan:
    """``runs``: (row, start, tokens, slot, samples)."""
    return StepPlan(
        step=0,
        seqs=tuple(SeqId(row) for row, *_ in runs),
        rows=np.array([r[0] for r in runs], np.int32),
        starts=np.array([r[1] for r in runs], np.int32),
        lengths=np.array([len(r[2]) for r in runs], np.int32),
        slots=np.array([r[3] for r in runs], np.int32),
        fresh=np.array(fresh if fresh is not None else [r[1] == 0 for r in runs], np.bool_),
        samples=np.array([r[4] for r in runs], np.bool_),
        tokens=np.array([t for r in runs for t in r[2]], np.int32),
        decode_count=decode_count,
        verify_count=0,
        rows_cleared=tuple(RowId(r) for r in rows_cleared),
        admissions=tuple(admissions),
        table_writes=np.array(table_writes, np.int32).reshape(-1, 3).T,
        taps=tuple(taps),
        prompt_logprob_runs=tuple(prompt_logprob_runs),
        reservation=NOTHING,
        preempted=(),
        table_patches=np.array(table_patches, np.int32).reshape(-1, 3).T,
        arena_work=ArenaWork(
            zero_frames=tuple(FrameId(f) for f in zero_frames),
            slot_copies=tuple(SlotCopy(SlotId(src), SlotId(dst)) for src, dst in slot_copies),
            page_copies=tuple(PageCopy(PageId(src), PageId(dst)) for src, dst in page_copies),
        ),
    )
