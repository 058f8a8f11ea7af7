"""The cache policies by name: the choices of ``debug.cache_policy``. A new policy is a new row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from weft.errors import ConfigError
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.edge import Node
from weft.memory.prefix.policy import Clock, Policy, PrefillCost, pages_alone, snapshot_above
from weft.memory.prefix.value.policy import ValuePolicy
from weft.memory.values import Match, NodeId
from weft.units import SeqId


class Marconi(Policy):
    """A policy by recency and FLOP per byte, as published for hybrid models, for comparison.

        score = recency + efficiency                each over its largest among the candidates
        efficiency = seconds to compute from the snapshot above / (state + KV that only it needs)

    Candidates are snapshots with at most one child, the lowest score first (Pan et al., Marconi, MLSys
    2025). The published weight of the second term is tuned by replaying the past; here it is 1. Each
    ``order`` scores every snapshot: fine for a simulation, and the reason not to serve with it."""

    name = "marconi"

    def __init__(self, plan: ArenaPlan, cost: PrefillCost, clock: Clock) -> None:
        self._plan = plan
        self._cost = cost
        self._clock = clock
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
        scores = [(when - oldest) / span + gain / most for when, gain in zip(used, gains, strict=True)]
        return (nodes[index] for index in sorted(range(len(nodes)), key=lambda index: (scores[index], index)))

    def _efficiency(self, node: Node) -> float:
        above = snapshot_above(node)
        saved = self._cost.between(above.end if above is not None else 0, node.end)
        return saved / (self._plan.slot_stride_bytes + pages_alone(node) * self._plan.page_bytes)


_FLAG = "debug.cache_policy"

POLICIES: dict[str, Callable[[ArenaPlan, PrefillCost, Clock], Policy]] = {
    "value": ValuePolicy,
    "lru": lambda plan, cost, clock: Policy(),
    "marconi": Marconi,
}

ALIASES = {"worth": "value"}
"""Older names that ``debug.cache_policy`` still accepts."""


def check_policy(name: str) -> None:
    """Raise ConfigError with the list of names if ``name`` is not one of them."""
    if ALIASES.get(name, name) not in POLICIES:
        raise ConfigError(f"{_FLAG} is {name!r}; it must be one of {', '.join(POLICIES)}", param=_FLAG)


def make_policy(name: str, plan: ArenaPlan, cost: PrefillCost, clock: Clock) -> Policy:
    """Return the policy called ``name`` for a memory of geometry ``plan``. A model without recurrent layers has no
    snapshots, so its KV goes by recency under every name. States and KV that may be compressed count with
    their compressed bytes, because compression comes before eviction."""
    check_policy(name)
    if plan.compressed_pages:
        plan = replace(plan, slot_stride_bytes=plan.compressed_bytes)
    if plan.compressed_kv_bytes:
        plan = replace(plan, page_bytes=plan.compressed_kv_bytes)
    policy = POLICIES[ALIASES.get(name, name)]
    return policy(plan, cost, clock) if plan.slots_per_frame else Policy()
