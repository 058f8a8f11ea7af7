"""Prefixes with names (``weft.memory.prefix.pins``), as the owner of an engine sets them.

    pin(names)    the snapshots are evicted last, and go to the store ahead of all others
    look          between two steps: which of these writes have ended?
    unpin(names)

A request that has just ended gives its state to the prefix tree a step later. So a pin is looked at again until
the engine had STEPS_TO_CLOSE steps or has nothing to do. A snapshot that is missing by then will not come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.engine.engine import EngineCore
from weft.engine.stats import NamedPrefix, PinState
from weft.memory.prefix.pins import PinnedPrefix
from weft.memory.values import NO_NODE
from weft.units import PAGE_TOKENS

STEPS_TO_CLOSE = 2
PIN_WRITE_S = 20.0
"""Most seconds that the owner of a name waits for the writes of its state."""


class Pinning:
    """The pins of ``core``, changed between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def pin(self, named: Sequence[NamedPrefix]) -> None:
        for prefix in named:
            self._offer(self._core.memory.pins.add(prefix.name, prefix.salt, prefix.tokens))

    def unpin(self, names: Sequence[str]) -> int:
        """Return how many of ``names`` named a prefix."""
        return sum(map(self._core.memory.pins.drop, names))

    def is_settled(self, named: Sequence[NamedPrefix]) -> bool:
        """Return whether all writes of ``named`` have ended."""
        core, pins = self._core, self._core.memory.pins
        for prefix in named:
            if prefix.name not in pins:
                continue
            pin = pins.of(prefix.name)
            waits = pin.write in ("due", "begun") and self._is_whole(pin)
            if core.store is not None and waits and core.store.writes.is_waiting:
                return False
        return True

    def states(self, named: Sequence[NamedPrefix]) -> list[PinState]:
        pins = self._core.memory.pins
        return [self._state(prefix.name, pins.of(prefix.name)) for prefix in named if prefix.name in pins]

    def offer_again(self, named: Sequence[NamedPrefix]) -> None:
        """Offer the store the snapshots that have come meanwhile."""
        pins = self._core.memory.pins
        for prefix in named:
            if prefix.name in pins:
                self._offer(pins.of(prefix.name))

    def _offer(self, prefix: PinnedPrefix) -> None:
        if self._core.store is not None and prefix.write == "due" and self._is_whole(prefix):
            self._core.store.writes.add(prefix.node)

    def _is_whole(self, prefix: PinnedPrefix) -> bool:
        return prefix.node != NO_NODE and prefix.position >= self._end_of(prefix)

    def _end_of(self, prefix: PinnedPrefix) -> int:
        whole = bool(self._core.memory.plan.slots_per_frame)
        return prefix.length if whole else prefix.length // PAGE_TOKENS * PAGE_TOKENS

    def _state(self, name: str, prefix: PinnedPrefix) -> PinState:
        plan = self._core.memory.plan
        nbytes = plan.pages_for(prefix.length) * plan.page_bytes
        nbytes += plan.slot_stride_bytes if plan.slots_per_frame else 0
        return PinState(name, prefix.position, self._is_stored(prefix), nbytes)

    def _is_stored(self, prefix: PinnedPrefix) -> bool:
        tier = self._core.store
        tokens = np.frombuffer(prefix.tokens, np.int32)
        return tier is not None and tier.store.match(prefix.salt or None, tokens, self._end_of(prefix) - 1) is not None
