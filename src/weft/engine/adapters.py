"""The adapters in memory: which ones are resident, in which order they are evicted, and which must stay.

    registered (names of a server)      any number: a name, a directory and a digest each
    resident (here)                     as many as ``limits.lora_memory`` holds, least recently used first out
    running                             a live sequence computes with it: it stays

A request brings its adapter as a value, so an engine that starts later, on another machine too, needs no list of names.
Reading takes milliseconds to seconds and changes nothing: a loop that must not wait reads in a thread and then calls
``keep`` between two steps. ``load`` does both.

A shortage is a return value (law L3): if running adapters leave no room for another one, it is not kept, and its
requests wait. An adapter that is larger than the complete budget is an error, as it would wait for ever.

Rejected: slots of one size for the largest rank (an adapter of rank 8 would take the bytes of one of rank 256); pinning
by a count that each end of a sequence must lower (evictions are rare enough to look at the live sequences).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Protocol

import msgspec

from weft.adapters import Adapter
from weft.errors import QueueFullError, RequestError
from weft.units import format_bytes


class ReadAdapter(Protocol):
    """An adapter that was read: ``weft.models.adapters.LoadedAdapter``."""

    @property
    def adapter(self) -> Adapter: ...

    @property
    def held_bytes(self) -> int: ...


class AdapterHost(Protocol):
    """The adapters of an executor. ``read_adapter`` may be called in any thread, the others between two steps, with its
    result."""

    def read_adapter(self, adapter: Adapter) -> ReadAdapter: ...

    def install_adapter(self, loaded: Any) -> None: ...

    def remove_adapter(self, loaded: Any) -> None: ...


class AdapterStats(msgspec.Struct, frozen=True):
    """Counts of adapters. ``resident``: in memory, with ``held_bytes`` of ``budget_bytes``. ``loads`` and
    ``evictions``: since the start.
    """

    resident: int = 0
    held_bytes: int = 0
    budget_bytes: int = 0
    loads: int = 0
    evictions: int = 0


class AdapterPool:
    """The adapters of one engine. ``host``: None for an engine that serves none; ``refusal`` is its error.
    ``rank_max``: of ``limits.max_lora_rank``. ``running``: digests that live sequences have.
    """

    def __init__(
        self,
        host: AdapterHost | None,
        *,
        budget_bytes: int = 0,
        rank_max: int = 0,
        running: Callable[[], Collection[str]] = tuple,
        refusal: str = "this engine serves no adapters",
    ) -> None:
        self._host = host
        self._refusal = refusal
        self._budget_bytes = budget_bytes
        self._rank_max = rank_max
        self.running = running
        self._resident: OrderedDict[str, ReadAdapter] = OrderedDict()
        self._loads = self._evictions = 0
        self.held_bytes = 0

    def stats(self) -> AdapterStats:
        return AdapterStats(len(self._resident), self.held_bytes, self._budget_bytes, self._loads, self._evictions)

    def find(self, adapter: Adapter) -> bool:
        """Return whether ``adapter`` is in memory, and mark it as the most recently used one."""
        if adapter.digest not in self._resident:
            return False
        self._resident.move_to_end(adapter.digest)
        return True

    def load(self, adapter: Adapter) -> None:
        """Read ``adapter`` and keep it. Raise CheckpointError where it cannot be served, QueueFullError where running
        ones leave no room."""
        if self.find(adapter):
            return
        if not self.keep(self.read(adapter)):
            raise QueueFullError(
                f"adapter {adapter.name} finds no room: adapters of running requests hold "
                f"{format_bytes(self.held_bytes)}; the limit is "
                f"{format_bytes(self._budget_bytes)} (limits.lora_memory). Try again later",
                param="limits.lora_memory",
                code="queue_full",
            )

    def check(self, adapter: Adapter) -> None:
        """Read ``adapter``, and keep it if it fits without an eviction. Raise CheckpointError,
        RequestError."""
        loaded = self.read(adapter)
        if self.held_bytes + loaded.held_bytes <= self._budget_bytes:
            self.keep(loaded)

    def read(self, adapter: Adapter) -> ReadAdapter:
        """Read ``adapter``; in any thread. Raise CheckpointError, RequestError."""
        if self._host is None:
            raise RequestError(self._refusal, param="model")
        if adapter.rank > self._rank_max:
            raise RequestError(
                f"adapter {adapter.name} has rank {adapter.rank}; the limit is {self._rank_max} (limits.max_lora_rank)",
                param="limits.max_lora_rank",
            )
        loaded = self._host.read_adapter(adapter)
        if loaded.held_bytes > self._budget_bytes:
            raise RequestError(
                f"adapter {adapter.name} takes {format_bytes(loaded.held_bytes)}; the limit of all is "
                f"{format_bytes(self._budget_bytes)} (limits.lora_memory)",
                param="limits.lora_memory",
            )
        return loaded

    def keep(self, loaded: ReadAdapter) -> bool:
        """Keep ``loaded``, between two steps, and return whether it is in memory now. False: running adapters leave it
        no room."""
        assert self._host is not None
        if self.find(loaded.adapter):
            return True
        room = self._budget_bytes - self.held_bytes
        if room < loaded.held_bytes:
            running = self.running()
            idle = [adapter for digest, adapter in self._resident.items() if digest not in running]
            if room + sum(adapter.held_bytes for adapter in idle) < loaded.held_bytes:
                return False
            for adapter in idle:
                if self._budget_bytes - self.held_bytes >= loaded.held_bytes:
                    break
                self._drop(adapter)
                self._evictions += 1
        self._host.install_adapter(loaded)
        self._resident[loaded.adapter.digest] = loaded
        self.held_bytes += loaded.held_bytes
        self._loads += 1
        return True

    def drop(self, digest: str) -> bool:
        """Evict an adapter, and return whether it is gone: it stays while a live sequence has it."""
        loaded = self._resident.get(digest)
        if loaded is None:
            return True
        if digest in self.running():
            return False
        self._drop(loaded)
        return True

    def forget(self) -> list[Adapter]:
        """Forget all adapters, as the weights that they change are gone. Return the adapters that live sequences have:
        they are needed again with the next weights."""
        running = self.running()
        needed = [loaded.adapter for digest, loaded in self._resident.items() if digest in running]
        self._resident.clear()
        self.held_bytes = 0
        return needed

    def _drop(self, loaded: ReadAdapter) -> None:
        assert self._host is not None
        del self._resident[loaded.adapter.digest]
        self.held_bytes -= loaded.held_bytes
        self._host.remove_adapter(loaded)
