"""The cache policies that can be compared, by name: the positions of states, and the order of evictions.

    arm         states are kept                                     leaves first
    value       as ``--snapshots auto``                           fewest saved seconds per byte
    marconi     as ``--snapshots auto``                           least recent and fewest FLOP per byte
    lru         as ``--snapshots auto``                           least recently used
    prompt      at the end of prompts and of requests               least recently used
    every:N     every N tokens of a prompt, at forks, at its end    least recently used
    none        nowhere, nothing is cached                          -
    ARM+compressed  as ARM                                          as ARM; KV and states are compressed first
    ARM+compressed4 as ARM                                          the same, KV in 4 bits

An arm is data: a ``SnapshotPolicy`` for the scheduler and a factory for the memory. A new policy is a new
row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.costs.step import CostModel
from weft.errors import ConfigError
from weft.memory.frames.plan import ArenaPlan, with_compressed_kv
from weft.memory.memory import Memory
from weft.memory.prefix.policies import ALIASES, make_policy
from weft.memory.prefix.policy import PrefillCost
from weft.schedule.snapshots import AUTO, NONE, PROMPT, SnapshotPolicy, parse_snapshots
from weft.spec import CompressedKvName

Clock = Callable[[], float]
MakeMemory = Callable[[ArenaPlan, CostModel, Clock], Memory]
"""A factory of the memory. A policy needs its arguments: geometry, the cost of computing, and a clock."""


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    snapshots: SnapshotPolicy
    make_memory: MakeMemory


_LONG = 1 << 16


def prefill_cost(cost: CostModel) -> PrefillCost:
    """Return the linear and the quadratic term of ``cost``, from two lengths."""
    half, whole = cost.prefill_s(0, _LONG), cost.prefill_s(0, 2 * _LONG)
    quadratic = max(0.0, whole - 2 * half) / (2 * _LONG**2)
    return PrefillCost(half / _LONG - quadratic * _LONG, quadratic)


_COMPRESSED: dict[str, CompressedKvName] = {"+compressed": "int8", "+compressed4": "int4"}


def _exact(make: MakeMemory) -> MakeMemory:
    """Return a memory that compresses nothing, whatever the geometry allows."""
    return lambda plan, cost, clock: make(replace(plan, compressed_pages=0, compressed_kv_bytes=0), cost, clock)


def _compression(make: MakeMemory, dtype: CompressedKvName) -> MakeMemory:
    """Return a memory that compresses all that the geometry allows, KV in ``dtype``."""

    def compressed(plan: ArenaPlan, cost: CostModel, clock: Clock) -> Memory:
        compresses = plan.compressed_kv_bytes and plan.kv_fields
        return make(with_compressed_kv(plan, dtype) if compresses else plan, cost, clock)

    return compressed


def _ranked_by(policy: str) -> MakeMemory:
    """Return a memory that evicts snapshots by ``policy``, and compresses them first if ``plan`` allows it."""

    def make(plan: ArenaPlan, cost: CostModel, clock: Clock) -> Memory:
        return Memory(plan, cache=True, policy=make_policy(policy, plan, prefill_cost(cost), clock))

    return make


_lru = _ranked_by("lru")


def _nothing(plan: ArenaPlan, cost: CostModel, clock: Clock) -> Memory:
    return Memory(plan, cache=False)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("value", AUTO, _ranked_by("value")),
        Arm("marconi", AUTO, _ranked_by("marconi")),
        Arm("lru", AUTO, _lru),
        Arm("prompt", PROMPT, _lru),
        Arm("none", NONE, _nothing),
    )
}

DEFAULT_ARM = "value"


def find_arm(name: str) -> Arm:
    """Return the arm called ``name``. Raise ConfigError that lists them."""
    exact_name, plus, suffix = name.partition("+")
    exact_name = ALIASES.get(exact_name, exact_name)
    arm = ARMS.get(exact_name)
    if arm is None and exact_name.startswith("every:"):
        arm = Arm(exact_name, parse_snapshots(exact_name), _lru)
    if arm is None or (plus and plus + suffix not in _COMPRESSED):
        raise ConfigError(
            f"--policy {name!r} is not a policy: there are {', '.join(ARMS)} and every:N "
            f"(N tokens, a multiple of 64), each also with {' or '.join(_COMPRESSED)}",
            param="--policy",
        )
    if plus:
        compressing = _compression(arm.make_memory, _COMPRESSED[plus + suffix])
        return replace(arm, name=exact_name + plus + suffix, make_memory=compressing)
    return replace(arm, make_memory=_exact(arm.make_memory))
