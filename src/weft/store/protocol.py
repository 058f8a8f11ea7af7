"""``Store``: what an engine may ask of a store. No call waits for a disk or a network.

    engine thread                                   threads of the store
    match, offer       memory only
    fetch  ---------->  queue of reads  ----------> read, verify, compare tokens --.
    put    ---------->  queue of writes ----------> records, tokens, ledger line --|
    poll   <---------------------------------------------------------------------- '

One thread calls every method. A store belongs to one namespace (``identity.NamespaceIdentity``): another
model, dtype or layout on the same path never matches.

* ``match`` compares hashes of tokens. The fetch compares the tokens themselves (law L10), before its event
  says ``fetched``.
* Buffers given to ``fetch`` and ``put`` belong to the store until ``poll`` returns the event of their ticket.
  Cancelling the request changes nothing of that.
* ``put`` is refused (None) when queues are full; the refusal is counted (L11). A put never waits (L9).

Rejected: futures or callbacks. An engine reads events between two steps like commands, so no callback runs
inside a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.store.stats import StoreStats
from weft.store.values import (
    KvPiece,
    PrefixTokens,
    PutOffer,
    StagingBuffers,
    StoredPrefix,
    StoreEvent,
    Ticket,
)


class Store(Protocol):
    """One namespace of one directory or bucket."""

    def match(self, salt: str | None, tokens: PrefixTokens, above: int) -> StoredPrefix | None:
        """The deepest stored checkpoint of more than ``above`` tokens that ``tokens`` begins with."""
        ...

    @property
    def changes(self) -> int:
        """Grows whenever ``match`` may answer otherwise."""
        ...

    def fetch(self, prefix: StoredPrefix, start: int, into: StagingBuffers) -> Ticket:
        """Reads the KV of [``start``, ``position``) and the state. ``start`` is a multiple of 16."""
        ...

    def offer(self, salt: str | None, tokens: PrefixTokens, position: int, *,
              exact: bool) -> PutOffer | None:
        """What a put of this checkpoint needs; None if it is stored, or if a put would be refused."""
        ...

    def put(self, salt: str | None, tokens: PrefixTokens, position: int, kv: Sequence[KvPiece],
            state: memoryview, *, exact: bool, seconds: float = 0.0, state_form: int = 0) -> Ticket | None:
        """Stores a checkpoint. ``kv`` covers [offer.start, ``position``) without gaps. ``seconds``: what a
        hit saves; eviction ranks by it. None: refused and counted."""
        ...

    def poll(self) -> list[StoreEvent]:
        """Events since the last call."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Ends the threads. Puts that are queued are written as far as a few seconds allow."""
        ...
