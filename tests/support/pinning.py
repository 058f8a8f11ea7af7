"""A simulation in which prefixes get names and lose them while requests run: sessions, and forks of them.

After some steps a prompt that was sent is named, a named one gets further names, or a name goes. Memory is as tight
as ever. Checked besides the laws of ``Simulation``:

    a pinned snapshot within the budget goes only with every snapshot that has no name and no use
    names take no page, no slot and no node
    the pinned snapshots that go last fit into the budget together (``Pins.audit``, after each step)
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np

from tests.support.simulator import Outcome, Simulation
from tests.support.workload import Scenario
from weft.memory.values import NO_NODE, NodeId
from weft.schedule.plan import StepPlan
from weft.units import PAD

NAMES = 12


class PinnedSimulation(Simulation):
    """``pins_share`` of the arena is for pinned snapshots. ``evicted``: pinned snapshots that went all the same;
    ``kept``: evictions of other snapshots while a pinned one was there; ``forks``: names of a named prefix."""

    def __init__(self, scenario: Scenario, pins_share: float) -> None:
        super().__init__(scenario, pins_share=pins_share)
        self.evicted = self.kept = self.forks = 0
        self._random = Random(scenario.seed)
        self._last: tuple[NodeId, ...] = ()
        self._snapshots: set[NodeId] = set()
        self._in_use: set[NodeId] = set()

    def _step(self, number: int) -> None:
        if self.core.failure is None:
            self._name()
            self._look()
        super()._step(number)

    def _name(self) -> None:
        random, pins = self._random, self.core.memory.pins
        if random.random() < 0.6:
            return
        name = f"s{random.randrange(NAMES)}"
        before = replace(self.core.memory.usage(), pinned_bytes=0)
        if random.random() < 0.2:
            pins.drop(name)
        elif random.random() < 0.4 and len(pins):
            prefix = random.choice(list(pins))
            pins.add(name, prefix.salt, prefix.tokens)
            self.forks += len(prefix.names) > 1
        else:
            request = random.choice(self.scenario.arrivals).request
            pins.add(name, request.salt, np.asarray(request.prompt_tokens, np.int32).tobytes())
        assert replace(self.core.memory.usage(), pinned_bytes=0) == before, "a name took memory"

    def _look(self) -> None:
        """Note the pinned snapshots before the next plan."""
        memory = self.core.memory
        tree = memory.prefix_tree
        self._last = memory.pins.last
        self._snapshots = {node.id for node in tree.nodes() if node.slot != PAD}
        held = [memory.lease(seq.id).shared_node for seq in self.core.scheduler.running]
        used = [*held, *self.core.scheduler.reuse.awaited()]
        self._in_use = {one for node in used if node != NO_NODE for one in tree.path_ids(node)}

    def executing(self, plan: StepPlan) -> None:
        evicted = {one.node for one in plan.reservation.evicted if one.what == "state"}
        pinned = evicted & set(self._last)
        self.evicted += len(pinned)
        self.kept += bool(self._last) * len(evicted - pinned)
        if pinned and self.core.memory.plan.slots_per_frame and not self.scenario.flush_every_steps:
            opened = {one.match.anchor for one in plan.reservation.opened}
            spared = {one for node in opened if node != NO_NODE for one in self.core.memory.prefix_tree.path_ids(node)}
            left = self._snapshots - evicted - set(self._last) - self._in_use - spared
            visited = {one.seq for one in plan.reservation.published}
            assert not left or visited, f"pinned snapshots went, and {len(left)} others stayed"
        super().executing(plan)

    def run(self) -> Outcome:
        outcome = super().run()
        assert self.core.memory.pins.usage == (0, 0), "all was flushed, and a pin holds something"
        return outcome
