"""The trace of a run: a hash of everything that was decided and delivered, and its last lines in words.

Two runs of one scenario must have the same hash: that is how "no clock, no randomness, no environment" is
checked. The hash takes everything; the lines kept for a failure report are the last few (law L11).
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b

import msgspec
import numpy as np

from weft.request import TokenEvent
from weft.schedule.plan import StepPlan

LINES_KEPT = 40
_ARRAYS = ("rows", "starts", "lengths", "slots", "fresh", "samples", "tokens", "table_writes",
           "table_patches", "slot_copies", "page_copies", "state_compressions", "state_restores", "kv_compressions",
           "kv_restores")
_TUPLES = ("seqs", "rows_cleared", "zero_frames", "taps", "prompt_logprob_runs", "preempted", "finished")


def plan_bytes(plan: StepPlan) -> bytes:
    """Every decision in ``plan``, for comparing two plans."""
    words = [repr((plan.step, plan.decode_count, plan.reservation, plan.reclaiming))]
    words += [repr(getattr(plan, name)) for name in _TUPLES]
    words += [repr((one.row, one.seq, one.prompt_tokens, one.seed, one.stop_ids, one.tokens.tolist()))
              for one in plan.admissions]
    arrays = [np.ascontiguousarray(getattr(plan, name)).tobytes() for name in _ARRAYS]
    return b"|".join([*(word.encode() for word in words), *arrays])


def plan_line(plan: StepPlan) -> str:
    """One line for people."""
    runs = [f"{seq}@{start}+{length}" for seq, start, length
            in zip(plan.seqs, plan.starts.tolist(), plan.lengths.tolist(), strict=True)]
    parts = [f"step {plan.step}", f"decode {plan.decode_count}", " ".join(runs) or "nothing"]
    for name in ("finished", "preempted"):
        if getattr(plan, name):
            parts.append(f"{name} {list(getattr(plan, name))}")
    for name in ("state_compressions", "state_restores", "kv_compressions", "kv_restores"):
        if getattr(plan, name).size:
            parts.append(f"{name} {getattr(plan, name).tolist()}")
    for name in ("slot_copies", "page_copies"):
        if getattr(plan, name).size:
            parts.append(f"{name} {getattr(plan, name).T.tolist()}")
    if plan.taps:
        parts.append(f"taps {[(tap.run, tap.position, tap.slot) for tap in plan.taps]}")
    if plan.admissions:
        parts.append(f"admitted {[one.seq for one in plan.admissions]}")
    return " | ".join(parts)


class Trace:
    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    def plan(self, plan: StepPlan) -> None:
        self._hash.update(plan_bytes(plan))
        self._lines.append(plan_line(plan))

    def events(self, events: list[TokenEvent], now_s: float) -> None:
        self._hash.update(msgspec.msgpack.encode((now_s, events)))

    def note(self, line: str) -> None:
        self._hash.update(line.encode())
        self._lines.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def tail(self) -> str:
        return "\n".join(self._lines)
