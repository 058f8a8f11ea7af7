"""``PeerStore``: a store at the other end of which is another engine. With separate engines for prefill and decode,
the prefill engine puts into it and the decode engine fetches from it.

    prefill engine                                                   decode engine
    order     a request brings the address of its decode engine
    wants     the snapshot of a chunk   --> put --Wire-->            Inbox    while the next one is computed
    put       the state after the prompt   -------------->           Inbox
    ended     <---------------- acknowledged --------------
              (the fleet submits the request there)                    match, fetch: a prefix like any other

``store`` is the engine's own, or ``NO_STORE``. A put that no order wants goes there. An order whose link
fails ends with a reason, and the last put goes to the engine's own store, if that is written: the other engine may read
the same store. Otherwise the request goes on as after the death of an engine.

An order ends once: the last bytes have arrived, or something failed, or nothing moved for QUIET_S after the prompt was
computed. The engine keeps nothing for an order; the computed prefix is cached like any other.

Laws: L9 (no step waits for a link), L11 (orders have a bound; transfer buffers and the inbox have theirs).
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.handoff import LINK_BYTES_S, LINK_LATENCY_S, LinkStats
from weft.memory.prefix_store import (
    STORED_PAGE_TOKENS,
    NewSnapshot,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    Store,
    StoredPrefix,
    StoreEvent,
    Ticket,
    token_bytes,
)
from weft.memory.usage import StoreStats
from weft.store.inbox import Inbox, Parcel, parcel_of

Int32s = npt.NDArray[np.int32]
ORDERS_MAX = 4096
QUIET_S = 2.0
"""Seconds without progress after which an order whose prompt is computed ends."""
_FADE = 0.9
_FIRST_TICKET = 1 << 52
"""First ticket of puts and fetches between engines; those of stores on disk stay below."""


class Outcome(NamedTuple):
    """Outcome of one parcel. ``reason``: empty for one that the other engine has verified and keeps."""

    ticket: int
    reason: str
    seconds: float


class Wire(Protocol):
    """A carrier of parcels. A send ends in exactly one outcome; its buffers are read until then."""

    @property
    def address(self) -> str:
        """Address where other engines reach this one."""

    def send(self, ticket: int, address: str, parcel: Parcel, payloads: Sequence[memoryview]) -> None: ...

    def outcomes(self) -> list[Outcome]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Order:
    """An order for another engine. Positions: ``start``, tokens that the other engine has; ``sent``, end of the last
    put; ``last``, end of all puts. ``moved_s``: time of the last progress. ``failed``: why the link failed; then the
    last put goes to the own store."""

    request_id: str
    address: str
    salt: str
    tokens: bytes
    start: int
    sent: int
    last: int
    in_flight: int = 0
    is_computed: bool = False
    moved_s: float = 0.0
    failed: str = ""

    @property
    def length(self) -> int:
        return len(self.tokens) // 4


class NoStore:
    """A ``Store`` without any prefix, which refuses every put."""

    @property
    def changes(self) -> int:
        return 0

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        return None

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        raise AssertionError("nothing is stored here")

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        return None

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        return None

    def clear(self) -> None:
        """Do nothing: no prefix is stored."""

    def poll(self) -> list[StoreEvent]:
        return []

    def stats(self) -> StoreStats:
        return StoreStats()

    def close(self) -> None:
        """Do nothing: no file was opened."""


NO_STORE = NoStore()


class PeerStore:
    """A ``Store``, and the ``Orders`` that it fills. ``namespace``: 16 bytes. ``page_bytes``, ``state_bytes``: of
    stored pages and states. ``chunk_tokens``: fewest tokens of a piece of a prompt that is sent separately. ``clock``
    gives seconds. ``wire``: None until ``plug``."""

    def __init__(
        self,
        store: Store,
        namespace: bytes,
        *,
        page_bytes: int,
        state_bytes: int,
        chunk_tokens: int,
        inbox_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.namespace = namespace
        self.inbox = Inbox(namespace, inbox_bytes, clock)
        self.chunk_tokens = chunk_tokens
        self.wire: Wire | None = None
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self._clock = clock
        self._orders: dict[str, _Order] = {}
        self._ended: list[tuple[str, str]] = []
        self._sends: dict[int, tuple[_Order, int]] = {}
        """Puts on the wire: their orders and sizes."""
        self._stored: dict[Ticket, _Order] = {}
        """Last puts that went to the own store."""
        self._tickets = itertools.count(_FIRST_TICKET)
        self._copies: queue.SimpleQueue[StoreEvent] = queue.SimpleQueue()
        self._copier = ThreadPoolExecutor(1, "inbox-copy")
        self._sent_bytes = self._well = self._badly = 0
        self._bytes, self._seconds = 0.0, 0.0

    def plug(self, wire: Wire) -> None:
        self.wire = wire

    # ------------------------------------------------------------------ orders

    @property
    def open(self) -> bool:
        return bool(self._orders)

    def order(self, request_id: str, address: str, salt: str, tokens: PrefixTokens, start: int) -> None:
        """Order the records of ``tokens`` from ``start`` on for the engine at ``address``. With ORDERS_MAX orders
        already under way it ends at once."""
        if len(self._orders) >= ORDERS_MAX or self.wire is None:
            self._ended.append((request_id, "too many handoffs wait"))
            return
        start -= start % STORED_PAGE_TOKENS
        self._orders[request_id] = _Order(
            request_id, address, salt, token_bytes(tokens), start, start, len(tokens), moved_s=self._clock()
        )

    def prompt_of(self, request_id: str) -> tuple[str, Int32s] | None:
        order = self._orders.get(request_id)
        return None if order is None else (order.salt, np.frombuffer(order.tokens, "<u4").astype(np.int32))

    def computed(self, request_id: str, position: int) -> None:
        """Note that a prompt is computed up to ``position``, so the rest must be sent. A model without states sends
        only complete pages."""
        order = self._orders.get(request_id)
        if order is None:
            return
        order.is_computed, order.moved_s, order.last = True, self._clock(), position
        if order.sent >= position and not order.in_flight:
            is_lost = position < order.length - order.length % STORED_PAGE_TOKENS and position <= order.start
            self._end(order, "its prefix is not cached any more" if is_lost else "")

    def cancel(self, request_id: str) -> None:
        """Cancel an order: no engine waits for it any more. Unknown ids are ignored."""
        self._orders.pop(request_id, None)

    def renew(self, namespace: bytes) -> None:
        """End the orders, as weights were replaced: records of other weights are refused from now on."""
        for order in list(self._orders.values()):
            self._end(order, "the weights were replaced")
        self.namespace = namespace
        self.inbox.renew(namespace)

    def forget_orders(self) -> None:
        self._orders.clear()
        self._ended.clear()

    def ended(self) -> list[tuple[str, str]]:
        """Return (request, reason of the failure or "") of orders that ended since the last call."""
        now_s = self._clock()
        for order in list(self._orders.values()):
            quiet_s = now_s - order.moved_s
            if order.is_computed and not order.in_flight and quiet_s > QUIET_S:
                self._end(order, order.failed or f"nothing to send for {quiet_s:.1f} s")
        ended, self._ended = self._ended, []
        return ended

    def wants(self, salt: str | None, tokens: PrefixTokens) -> bool:
        return self._wanting(salt, tokens) is not None

    def _wanting(self, salt: str | None, tokens: PrefixTokens) -> _Order | None:
        """Return the order that wants the snapshot at the end of ``tokens``: the last snapshot of the prompt, or one at
        least a chunk beyond the last put."""
        position = len(tokens)
        for order in self._orders.values():
            is_due = position == order.last or (
                position - order.sent >= self.chunk_tokens and not order.failed and position < order.last
            )
            if (
                is_due
                and order.sent < position
                and order.salt == (salt or "")
                and order.tokens.startswith(token_bytes(tokens))
            ):
                return order
        return None

    def _end(self, order: _Order, reason: str) -> None:
        if self._orders.pop(order.request_id, None) is not None:
            self._well += not reason
            self._badly += bool(reason)
            self._ended.append((order.request_id, reason))

    # ------------------------------------------------------------------ a Store

    @property
    def changes(self) -> int:
        return self.store.changes + self.inbox.changes

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        near = self.inbox.match(salt, tokens, above)
        stored = self.store.match(salt, tokens, above if near is None else near.position)
        return near if stored is None else stored

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        if not prefix.near:
            return self.store.fetch(prefix, start, into)
        ticket = Ticket(next(self._tickets))
        self._copier.submit(self._copy, ticket, prefix, start, into)
        return ticket

    def _copy(self, ticket: Ticket, prefix: StoredPrefix, start: int, into: StagingBuffers) -> None:
        copied = self.inbox.copy(prefix, start, into)
        if copied:
            self.inbox.drop(prefix)
        self._copies.put(StoreEvent(ticket, "fetched" if copied else "missing", nbytes=copied))

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        order = self._wanting(salt, tokens[:position])
        if order is None or order.failed:
            return self.store.offer(salt, tokens, position, exact=exact)
        return PutOffer(order.sent - order.sent % STORED_PAGE_TOKENS, position, order.sent)

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        position = snapshot.position
        order = self._wanting(snapshot.salt, np.frombuffer(snapshot.tokens, np.int32))
        if order is None or order.failed or not snapshot.kv or snapshot.start > order.sent:
            ticket = self.store.put(snapshot)
            if order is not None and order.failed and ticket is not None:
                order.in_flight, order.sent = order.in_flight + 1, position
                self._stored[ticket] = order
            return ticket
        assert self.wire is not None
        pieces = [(piece.start, piece.end, piece.form, piece.payload) for piece in snapshot.kv]
        pieces.append((position, position, snapshot.state_form, snapshot.state))
        parcel = parcel_of(
            self.namespace,
            order.request_id,
            snapshot.salt,
            snapshot.tokens,
            snapshot.start,
            pieces,
            exact=snapshot.exact,
        )
        ticket = Ticket(next(self._tickets))
        self._sends[ticket] = order, parcel.nbytes
        order.sent, order.in_flight, order.moved_s = position, order.in_flight + 1, self._clock()
        self.wire.send(ticket, order.address, parcel, [payload for *_, payload in pieces])
        return ticket

    def clear(self) -> None:
        """Clear the own store. Records of other engines stay: requests that are under way wait for them."""
        self.store.clear()

    def poll(self) -> list[StoreEvent]:
        events = []
        self.inbox.expire()
        for event in self.store.poll():
            order = self._stored.pop(event.ticket, None)
            if order is not None:
                order.in_flight -= 1
                self._end(order, "" if event.kind == "written" else order.failed)
            events.append(event)
        while not self._copies.empty():
            events.append(self._copies.get())
        for outcome in () if self.wire is None else self.wire.outcomes():
            events.append(self._take(outcome))
        return events

    def _take(self, outcome: Outcome) -> StoreEvent:
        order, nbytes = self._sends.pop(outcome.ticket)
        order.in_flight -= 1
        order.moved_s = self._clock()
        if outcome.reason:
            order.failed = order.failed or outcome.reason
            if self.store.stats().writable:
                order.sent = 0  # the own store may take all of it
            else:
                self._end(order, order.failed)
            return StoreEvent(Ticket(outcome.ticket), "dropped", outcome.reason, nbytes)
        self._sent_bytes += nbytes
        self._bytes = _FADE * self._bytes + nbytes
        self._seconds = _FADE * self._seconds + outcome.seconds
        if order.sent >= order.last and not order.in_flight and not order.failed:
            self._end(order, "")
        return StoreEvent(Ticket(outcome.ticket), "written", nbytes=nbytes, seconds=outcome.seconds)

    def stats(self) -> StoreStats:
        return self.store.stats()

    def link_stats(self) -> LinkStats:
        rate = self._bytes / self._seconds if self._seconds else LINK_BYTES_S
        return LinkStats(
            self._sent_bytes,
            self.inbox.received_bytes,
            self._well,
            self._badly,
            self.inbox.refused,
            rate,
            LINK_LATENCY_S,
            self._page_bytes,
            self._state_bytes,
            self.chunk_tokens,
            self.inbox.limit_bytes,
        )

    def close(self) -> None:
        self._copier.shutdown(wait=True, cancel_futures=True)
        if self.wire is not None:
            self.wire.close()
        self.store.close()
