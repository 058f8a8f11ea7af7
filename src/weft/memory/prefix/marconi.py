"""The policy ``marconi``: recency and FLOP per byte, as published for hybrid models, for comparison.

    score = recency + alpha x efficiency        each over its largest among the candidates
    efficiency = seconds to compute from the checkpoint above / (state + KV that only it needs)

Candidates are checkpoints with at most one child, the lowest score first (Pan et al., Marconi, MLSys 2025).
Bytes are those that only the checkpoint needs, not those of the whole prefix. The published alpha is tuned by
replaying the past; here it is 1.

Each ``order`` scores every checkpoint. That is fine for a simulation, and the reason not to serve with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.edge import Node
from weft.memory.prefix.holdings import checkpoint_above, pages_alone
from weft.memory.prefix.policy import Clock, LeastRecentlyUsed, PrefillCost
from weft.memory.values import Match, NodeId
from weft.units import SeqId


class Marconi(LeastRecentlyUsed):
    name = "marconi"

    def __init__(self, plan: ArenaPlan, cost: PrefillCost, clock: Clock, *, alpha: float = 1.0) -> None:
        self._plan = plan
        self._cost = cost
        self._clock = clock
        self._alpha = alpha
        self._used_s: dict[NodeId, float] = {}

    def costs(self, cost: PrefillCost) -> None:
        self._cost = cost

    def opened(self, seq: SeqId, match: Match, anchor: Node | None) -> None:
        if anchor is not None:
            self.duplicated(anchor)

    def saved(self, seq: SeqId, node: Node, rest: bytes, *, ended: bool) -> None:
        self._used_s[node.id] = self._clock()

    def duplicated(self, node: Node) -> None:
        if node.id in self._used_s:
            self._used_s[node.id] = self._clock()

    def evicted(self, node: Node) -> None:
        self._used_s.pop(node.id, None)

    def order(self, states: Mapping[NodeId, Node]) -> Iterator[Node]:
        nodes = [node for node in states.values() if len(node.children) <= 1]
        if not nodes:
            return iter(())
        used = [self._used_s[node.id] for node in nodes]
        oldest, newest = min(used), max(used)
        gains = [self._efficiency(node) for node in nodes]
        span, most = (newest - oldest) or 1.0, max(gains) or 1.0
        scores = [(when - oldest) / span + self._alpha * gain / most
                  for when, gain in zip(used, gains, strict=True)]
        return (nodes[at] for at in sorted(range(len(nodes)), key=lambda at: (scores[at], at)))

    def _efficiency(self, node: Node) -> float:
        above = checkpoint_above(node)
        saved = self._cost.between(above.end if above is not None else 0, node.end)
        return saved / (self._plan.slot_stride_bytes + pages_alone(node) * self._plan.page_bytes)
