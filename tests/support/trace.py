"""The trace of a run: a hash of everything that was decided and delivered, and its last lines in words.

Two runs of one scenario must have the same hash. This checks "no clock, no randomness, no environment". The
hash takes everything. The lines for a failure report are the last few only (law L11).

The hash is over values, in the order of the fields, as msgpack. Names of classes and fields are not part of
it, so a rename changes no trace.

Rejected: a hash of ``repr`` (a rename looks like another decision, and a field without repr is not seen).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from hashlib import blake2b
from operator import attrgetter, index
from typing import Any

import msgspec
import numpy as np

from weft.request import TokenEvent
from weft.schedule.plan import Admission, StepPlan

TAIL_LINES = 40
_PLAIN = frozenset({int, str, bytes, float, bool, type(None)})
"""Types that msgpack takes unchanged; nearly every value of a plan has one of them."""


def plan_bytes(plan: StepPlan) -> bytes:
    """Return every decision in ``plan`` as bytes, to compare two plans."""
    return msgspec.msgpack.encode(_values(plan), enc_hook=index)


def _values(value: Any) -> Any:
    """Return nested lists of plain values, without names."""
    return _way_of(type(value))(value)


def _listed(values: Iterable[Any]) -> list[Any]:
    return [one if type(one) in _PLAIN else _way_of(type(one))(one) for one in values]


@cache
def _way_of(kind: type) -> Callable[[Any], Any]:
    """Return the function that makes lists of a value of ``kind``; cached, because every value needs it."""
    if issubclass(kind, (tuple, list)):
        return _listed
    if issubclass(kind, np.ndarray):
        return np.ndarray.tolist
    if issubclass(kind, Enum) and not issubclass(kind, int):
        return attrgetter("value")
    if issubclass(kind, Admission):
        return lambda one: [one.row, one.seq, one.prompt_tokens, one.seed, one.stop_ids, one.tokens.tolist()]
    if issubclass(kind, msgspec.Struct):
        return lambda one: _listed(msgspec.structs.astuple(one))
    if is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        return lambda one: _listed([getattr(one, name) for name in names])
    return lambda one: one


def plan_line(plan: StepPlan) -> str:
    """Return ``plan`` as one line to read."""
    runs = [
        f"{seq}@{start}+{length}"
        for seq, start, length in zip(plan.seqs, plan.starts.tolist(), plan.lengths.tolist(), strict=True)
    ]
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
        """Add ``plan`` to the hash, and return its bytes."""
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
