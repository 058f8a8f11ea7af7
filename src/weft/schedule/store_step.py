"""The part of a step plan that belongs to the store: fetches that begin, loads, and leases that close.

These are frozen values, like the plan. ``store_tier`` makes them true when the plan is committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.memory.prefix_store import StoredPrefix
from weft.units import SeqId


class FetchKey(NamedTuple):
    """A stored checkpoint in a namespace of salts."""

    salt: str
    checkpoint: int


class FetchWish(NamedTuple):
    """``seq`` waits for ``prefix`` from the commit of this plan on; ``start``: KV from there on is read.
    ``others``: requests that run or wait beside it."""

    seq: SeqId
    key: FetchKey
    prefix: StoredPrefix
    start: int
    others: int = 0


@dataclass(frozen=True, slots=True)
class StoreStep:
    """``wishes``: fetches that begin, or that one more request waits for. ``loads``: fetches whose bytes this
    step loads. ``closed``: loads of the step before, whose leases close."""

    wishes: tuple[FetchWish, ...] = ()
    loads: tuple[FetchKey, ...] = ()
    closed: tuple[FetchKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.wishes or self.loads or self.closed)


NO_STORE_STEP = StoreStep()
