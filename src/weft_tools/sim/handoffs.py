"""``weft simulate --roles``: records between engines without bytes, on a clock that its caller moves.

    prefill player    a chunk is computed --> its KV and a state leave the device, then wait for the link
    ``VirtualLink``   one parcel after the other, at the rate of the link
    decode player     the last one has arrived --> ``VirtualInbox`` --> ``StoreTier``: match, fetch, load

The receiving side is the engine's code: the inbox with its limit, the restore with buffers, and the steps that load
records. On the sending side only the times are modelled, chunk by chunk like ``store.peer_store``.

Left out: checksums (10 GB/s on one core), records of an engine that died in the middle, the fallback.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from weft.costs.restore import RestorePrices
from weft.costs.step import CostModel
from weft.handoff import LINK_LATENCY_S, LinkStats
from weft.memory.memory import Memory
from weft.memory.prefix_store import (
    PrefixTokens,
    StagingBuffers,
    StoredPrefix,
    StoreEvent,
    Ticket,
    Uint8s,
    buffer_limit,
    token_bytes,
)
from weft.schedule.store_tier import StoreTier
from weft.store.inbox import FULL, Inbox, Parcel, SentRecord
from weft.store.peer_store import NoStore
from weft.units import PAGE_TOKENS, ceil_div
from weft_tools.sim.store_tier import LINK_BYTES_S, NAMESPACE, scratch_buffers

_GUESS_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A link with ``bytes_s`` from one engine to others. ``page_bytes``, ``state_bytes``: of all ``ranks`` together.
    ``chunk_tokens``: tokens sent at once."""

    bytes_s: float
    page_bytes: int
    state_bytes: int
    chunk_tokens: int
    ranks: int = 1
    latency_s: float = LINK_LATENCY_S

    def stats(self, arena_bytes: int) -> LinkStats:
        """Return the counters that an engine with that memory reports."""
        return LinkStats(
            bytes_s=self.bytes_s,
            latency_s=self.latency_s,
            kv_bytes=self.page_bytes,
            state_bytes=self.state_bytes,
            chunk_tokens=self.chunk_tokens,
            room_bytes=buffer_limit(arena_bytes * self.ranks),
        )

    def copy_s(self, nbytes: int) -> float:
        """Return the seconds of a copy between devices and their host."""
        return nbytes / (LINK_BYTES_S * self.ranks)

    def tier_for(self, memory: Memory, cost: CostModel, clock: Callable[[], float]) -> tuple[StoreTier, VirtualInbox]:
        """Return the tier of an engine that gets records, and the inbox where they arrive."""
        buffers, scratch_B = scratch_buffers(memory, self.page_bytes, self.state_bytes, self.ranks)
        inbox = VirtualInbox(self, scratch_B, clock)
        prices = RestorePrices(cost.prefill_s(0, _GUESS_TOKENS) / _GUESS_TOKENS)
        return StoreTier(inbox, memory, buffers, prices, clock, exact=False), inbox


class VirtualLink:
    """The link of one sending engine, which sends parcels one after the other."""

    def __init__(self, model: LinkModel) -> None:
        self.sent_bytes = 0
        self._model = model
        self._free_s = 0.0

    def send(self, start: int, end: int, now_s: float) -> float:
        """Return the time at which the KV of [``start``, ``end``) and a state have arrived."""
        model = self._model
        nbytes = ceil_div(end - start, PAGE_TOKENS) * model.page_bytes + model.state_bytes
        self.sent_bytes += nbytes
        self._free_s = max(self._free_s, now_s) + nbytes / model.bytes_s
        return self._free_s + model.latency_s


class VirtualInbox(NoStore):
    """A ``Store`` of arrived records. ``scratch_B`` represents all bytes."""

    def __init__(self, model: LinkModel, scratch_B: Uint8s, clock: Callable[[], float]) -> None:
        self._model, self._scratch_B, self._clock = model, scratch_B, clock
        self._inbox = Inbox(NAMESPACE, len(scratch_B), clock)
        self._events: list[tuple[float, int, StoredPrefix]] = []
        self._tickets = 0

    @property
    def changes(self) -> int:
        return self._inbox.changes

    @property
    def next_event_s(self) -> float:
        return self._events[0][0] if self._events else inf

    def arrive(self, name: str, salt: str, tokens: PrefixTokens, start: int) -> bool:
        """Accept the KV of ``tokens`` from ``start`` on, and the state after them. A model without states has only
        complete pages. Return False while there is no room."""
        model, position = self._model, len(tokens)
        if not model.state_bytes:
            position -= position % PAGE_TOKENS
        kv_bytes = ceil_div(position - start, PAGE_TOKENS) * model.page_bytes
        records = [(SentRecord(start, position, 0, kv_bytes, b""), self._scratch_B[:kv_bytes])]
        if position <= start or kv_bytes + model.state_bytes > len(self._scratch_B):
            return True
        records.append(
            (SentRecord(position, position, 0, model.state_bytes, b""), self._scratch_B[: model.state_bytes])
        )
        parcel = Parcel(
            namespace=NAMESPACE,
            handoff=name,
            salt=salt,
            tokens=token_bytes(tokens[:position]),
            start=start,
            position=position,
            exact=True,
            records=[record for record, _ in records],
        )
        return self._inbox.add(parcel, records) != FULL

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        return self._inbox.match(salt, tokens, above)

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        self._tickets += 1
        copied_s = self._clock() + self._model.copy_s(prefix.bytes_from(start))
        heapq.heappush(self._events, (copied_s, self._tickets, prefix))
        return Ticket(self._tickets)

    def poll(self) -> list[StoreEvent]:
        self._inbox.expire()
        events = []
        while self._events and self._events[0][0] <= self._clock():
            _, ticket, prefix = heapq.heappop(self._events)
            self._inbox.drop(prefix)
            events.append(StoreEvent(Ticket(ticket), "fetched", nbytes=prefix.bytes_from(0)))
        return events
