"""The trace of a run: a hash of everything that was decided and delivered, and its last lines in words.

Two runs of one scenario must have the same hash. This checks "no clock, no randomness, no environment". The
hash takes everything. The lines for a failure report are the last few only (law L11).

The hash is over values, in the order of the fields, as msgpack. Names of classes and fields are not part of
it, so a rename changes no trace.

Rejected: a hash of ``repr`` (a rename looks like another decision, and a field without repr is not seen).
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from operator import index
from typing import Any

import msgspec
import numpy as np

from weft.request import TokenEvent
from weft.schedule.plan import Admission, StepPlan

TAIL_LINES = 40
_PLAIN = frozenset({int, str, bytes, float, bool, type(None)})
"""What msgpack takes as it is; nearly every value of a plan."""


def plan_bytes(plan: StepPlan) -> bytes:
    """Every decision in ``plan``, for comparing two plans."""
    return msgspec.msgpack.encode(_values(plan), enc_hook=index)


def _values(value: Any) -> Any:
    """Nested lists of plain values, without names."""
    if isinstance(value, (tuple, list)):
        return [one if type(one) in _PLAIN else _values(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Enum) and not isinstance(value, int):
        return value.value
    if isinstance(value, Admission):
        return [value.row, value.seq, value.prompt_tokens, value.seed, value.stop_ids, value.tokens.tolist()]
    if isinstance(value, msgspec.Struct):
        return _values(msgspec.structs.astuple(value))
    if is_dataclass(value):
        return _values([getattr(value, name) for name in _field_names(value.__class__)])
    return value


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def plan_line(plan: StepPlan) -> str:
    """One line for people."""
    runs = [f"{seq}@{start}+{length}" for seq, start, length
            in zip(plan.seqs, plan.starts.tolist(), plan.lengths.tolist(), strict=True)]
    parts = [f"step {plan.step}", f"decode {plan.decode_count}", " ".join(runs) or "nothing"]
    for name in ("finished", "preempted"):
        if getattr(plan, name):
            parts.append(f"{name} {list(getattr(plan, name))}")
    parts += [f"{kind.value} {ids.tolist()}" for kind, ids in plan.arena_work.ordered()]
    if plan.taps:
        parts.append(f"taps {[(tap.run, tap.position, tap.slot) for tap in plan.taps]}")
    if plan.admissions:
        parts.append(f"admitted {[one.seq for one in plan.admissions]}")
    return " | ".join(parts)


class Trace:
    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._tail: deque[str | StepPlan] = deque(maxlen=TAIL_LINES)

    def plan(self, plan: StepPlan) -> bytes:
        """The bytes of ``plan`` that the hash has taken."""
        encoded = plan_bytes(plan)
        self._hash.update(encoded)
        self._tail.append(plan)
        return encoded

    def events(self, events: list[TokenEvent], now_s: float) -> None:
        self._hash.update(msgspec.msgpack.encode((now_s, _values(events))))

    def note(self, line: str) -> None:
        self._hash.update(line.encode())
        self._tail.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def tail(self) -> str:
        return "\n".join(one if isinstance(one, str) else plan_line(one) for one in self._tail)
