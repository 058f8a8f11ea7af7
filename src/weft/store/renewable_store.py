"""``RenewableStore``: a store whose namespace changes when the weights of the running engine are replaced.

    put, fetch --ticket of the store below--> ticket here          one count over all stores
    renew      the store below is closed; its unfinished tickets end as dropped; the next store opens

Tickets of two stores are equal numbers, so the engine knows them by numbers of its own. A put that the old
store has accepted is written by its close, within a few seconds, under the old namespace.

Law: L10 at the scale of models: no record of one store is an answer of the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from weft.memory.prefix_store import (
    NewSnapshot,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    Store,
    StoredPrefix,
    StoreEvent,
    Ticket,
)
from weft.memory.usage import StoreStats
from weft.store.peer_store import NO_STORE


class RenewableStore:
    """A store that can be replaced. ``below``: the first store, which belongs to this one."""

    def __init__(self, below: Store) -> None:
        self.below = below
        self._outer: dict[Ticket, Ticket] = {}
        self._numbers = itertools.count(1)
        self._changes_before = 0
        self._events: list[StoreEvent] = []

    def renew(self, open_next: Callable[[], Store]) -> None:
        """Close the store below and open the next. Raise ConfigError if that cannot be opened; then nothing is stored
        any more."""
        self.below.close()
        self._events += self._renamed(self.below.poll())
        self._events += [StoreEvent(ticket, "dropped", "weights") for ticket in self._outer.values()]
        self._outer.clear()
        self._changes_before += self.below.changes + 1
        self.below = NO_STORE
        self.below = open_next()

    @property
    def changes(self) -> int:
        return self._changes_before + self.below.changes

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        return self.below.match(salt, tokens, above)

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        return self._numbered(self.below.fetch(prefix, start, into))

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *, exact: bool) -> PutOffer | None:
        return self.below.offer(salt, tokens, position, exact=exact)

    def put(self, snapshot: NewSnapshot) -> Ticket | None:
        ticket = self.below.put(snapshot)
        return None if ticket is None else self._numbered(ticket)

    def clear(self) -> None:
        self.below.clear()

    def poll(self) -> list[StoreEvent]:
        events, self._events = self._events, []
        return [*events, *self._renamed(self.below.poll())]

    def stats(self) -> StoreStats:
        return self.below.stats()

    def close(self) -> None:
        self.below.close()

    def _numbered(self, ticket: Ticket) -> Ticket:
        number = self._outer[ticket] = Ticket(next(self._numbers))
        return number

    def _renamed(self, events: Sequence[StoreEvent]) -> list[StoreEvent]:
        return [
            StoreEvent(self._outer.pop(event.ticket), event.kind, event.reason, event.nbytes, event.seconds)
            for event in events
        ]
