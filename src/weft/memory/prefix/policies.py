"""The cache policies by name: the choices of ``debug.cache_policy``. A new policy is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.errors import ConfigError
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.marconi import Marconi
from weft.memory.prefix.policy import Clock, LeastRecentlyUsed, Policy, PrefillCost
from weft.memory.prefix.value.policy import ValuePolicy

_FLAG = "debug.cache_policy"

POLICIES: dict[str, Callable[[ArenaPlan, PrefillCost, Clock], Policy]] = {
    "value": ValuePolicy,
    "lru": lambda plan, cost, clock: LeastRecentlyUsed(),
    "marconi": Marconi,
}


ALIASES = {"worth": "value"}
"""Older names that ``debug.cache_policy`` still accepts."""


def check_policy(name: str) -> None:
    """Raises ConfigError with the list of names if ``name`` is not one of them."""
    if ALIASES.get(name, name) not in POLICIES:
        raise ConfigError(f"{_FLAG} is {name!r}; it must be one of {', '.join(POLICIES)}", param=_FLAG)


def make_policy(name: str, plan: ArenaPlan, cost: PrefillCost, clock: Clock) -> Policy:
    """The policy called ``name`` for a memory of geometry ``plan``. A model without recurrent layers has no
    checkpoints, so its KV goes by recency under every name. States and KV that may be compressed count with
    their compressed bytes, because compression comes before eviction."""
    check_policy(name)
    if plan.compressed_pages:
        plan = replace(plan, slot_stride_bytes=plan.compressed_bytes)
    if plan.compressed_kv_bytes:
        plan = replace(plan, page_bytes=plan.compressed_kv_bytes)
    policy = POLICIES[ALIASES.get(name, name)]
    return policy(plan, cost, clock) if plan.slots_per_frame else LeastRecentlyUsed()
