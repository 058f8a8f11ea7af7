"""The store as the scheduler sees it: restores of waiting requests, and writes of computed snapshots.

    poll       between steps: events of the store, deadlines, the next write
    look       in a plan, for each request that would be admitted
    close_loads, work   in a plan: leases of loads that close, and stores
    committed  what the plan decided becomes true
    finished   the transfers of a step have ended: its buffers may be used or freed

``StoreStep`` is the part of a step plan that belongs to the store (``tier_values``). Without a store the
scheduler has no ``StoreTier``, and plans have NO_STORE_STEP.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.costs.restore import RestorePrices
from weft.handoff import LinkStats
from weft.memory.memory import Memory
from weft.memory.prefix_store import Orders, Store, TransferBuffers
from weft.memory.values import NO_NODE
from weft.schedule.plan import StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.restores import FetchState, Restores
from weft.schedule.store_writes import STEP_BYTES, StoreWrites
from weft.schedule.tier_values import TierStats
from weft.units import PAD, SeqId


class StoreTier:
    """The store of one scheduler. ``exact``: prefixes that were compressed once are not used. ``write_bytes_s``: the
    pace of writes, 0 for none. ``clock`` returns seconds and never goes back. ``step_bytes``: most bytes that a step
    with runs copies for the store. ``compressed``: compressed parts are written as they are. ``stored_share``: bytes on
    the disk for a byte of a put."""

    def __init__(
        self,
        store: Store,
        memory: Memory,
        buffers: TransferBuffers,
        prices: RestorePrices,
        clock: Callable[[], float],
        *,
        exact: bool,
        write_bytes_s: float = 0.0,
        step_bytes: int = STEP_BYTES,
        compressed: bool = True,
        stored_share: Callable[[], float] = lambda: 1.0,
        orders: Orders | None = None,
    ) -> None:
        self.store = store
        self._memory, self._orders = memory, orders
        self.link_stats: Callable[[], LinkStats | None] = lambda: None
        """Function that returns the counters of handoffs to other engines."""
        self.renew: Callable[[], None] = lambda: None
        """Function that is called with new weights: records belong to their namespace from then on."""
        self.buffers = buffers
        self.prices = prices
        self.restores = Restores(
            store,
            buffers,
            prices,
            clock,
            exact=exact,
            is_pinned=lambda prefix: memory.pins.covers(prefix.salt or "", prefix.tokens),
        )
        self.writes = StoreWrites(
            store,
            memory,
            buffers,
            prices,
            clock,
            write_bytes_s=write_bytes_s,
            step_bytes=step_bytes,
            compressed=compressed,
            stored_share=stored_share,
            orders=orders,
        )

    @property
    def has_step(self) -> bool:
        """Whether a step has work for the store even without requests."""
        return self.restores.has_leases or self.writes.has_step

    @property
    def is_waiting(self) -> bool:
        """Whether something waits for the store and needs no step: ``poll`` again soon."""
        return bool(self.restores.fetches) or self.writes.is_waiting

    @property
    def may_stop_plans(self) -> bool:
        """Whether a plan may have to wait: for a fetch, or for the end of a write whose node is gone."""
        return bool(self.restores.fetches) or self.writes.has_step

    @property
    def next_poll_s(self) -> float:
        """The time at which ``poll`` may change something although the store has no event; infinity for never."""
        return min(self.restores.next_deadline_s, self.writes.next_look_s)

    def seek(self, request_id: str, *, computed: bool) -> None:
        """Add as a candidate the deepest snapshot that memory has of an order; otherwise only new snapshots become
        candidates. ``computed``: the order's prompt is computed, and its prefix is in the tree."""
        prompt = None if self._orders is None else self._orders.prompt_of(request_id)
        if prompt is None or self._orders is None:
            return
        salt, tokens = prompt
        match = self._memory.match(np.append(tokens, np.int32(PAD)), salt=salt)  # a match leaves out the last token
        if computed:
            self._orders.computed(request_id, match.cached_tokens)
        if match.anchor != NO_NODE:
            self.writes.add(match.anchor)

    def poll(self) -> None:
        for event in self.store.poll():
            if not self.restores.take(event):
                self.writes.take(event)
        self.restores.end_late()
        self.writes.look()

    def close_loads(self, step: PlanBuilder) -> None:
        """Close the leases of loads that have ended: their pages and states enter the tree."""
        loaded = {key: fetch for key, fetch in self.restores.fetches.items() if fetch.state is FetchState.LOADED}
        for fetch in loaded.values():
            step.transaction.close(fetch.lease, keep=fetch.tokens)
        step.closed_loads = tuple(loaded)

    def committed(self, plan: StepPlan) -> set[SeqId]:
        """Make the store's part of ``plan`` true. Returns the requests whose prefix memory has now: brought by a load,
        or needed by a fetch that begins."""
        served = {wish.seq for wish in plan.store.wishes}
        for key in plan.store.closed:
            served |= self.restores.published(key)
        for key in plan.store.loads:
            self.restores.loading(key, plan.step)
        for wish in plan.store.wishes:
            self.restores.begin(wish)
        opened = [opening.match for opening in plan.reservation.opened]
        self.prices.declined(sum(match.lost.stored > 0 for match in opened))
        self.writes.committed(plan.arena_work, plan.step, [match.anchor for match in opened])
        return served

    def finished(self, plan: StepPlan) -> None:
        """Note that ``plan`` is computed, its transfers have ended, and so have all before it."""
        self.restores.finished(plan.step)
        self.writes.finished(plan.step)

    def clear(self) -> None:
        """Forget stored prefixes, and those about to be stored."""
        self.writes.clear()
        self.store.clear()

    def forget(self) -> None:
        """Forget fetches and writes, as memory is lost, and the store's records may be of other weights from now on. No
        step is in flight and no load holds a lease."""
        self.restores.forget_all()
        self.writes.forget()

    def close(self) -> None:
        """End the use of the store; no step is in flight. Idempotent."""
        self.store.close()

    def stats(self) -> TierStats:
        return TierStats(
            self.restores.counts,
            self.writes.counts,
            self.store.stats(),
            sum(len(fetch.seqs) for fetch in self.restores.fetches.values()),
            self.buffers.used_bytes,
        )
