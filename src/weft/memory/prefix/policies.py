"""The cache policies by name: what ``--cache-policy`` chooses among. A new one is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.errors import ConfigError
from weft.memory.frames.plan import ArenaPlan
from weft.memory.prefix.marconi import Marconi
from weft.memory.prefix.policy import Clock, LeastRecentlyUsed, Policy, PrefillCost
from weft.memory.prefix.value.policy import ValuePolicy

_FLAG = "--cache-policy"

POLICIES: dict[str, Callable[[ArenaPlan, PrefillCost, Clock], Policy]] = {
    "worth": ValuePolicy,
    "lru": lambda plan, cost, clock: LeastRecentlyUsed(),
    "marconi": Marconi,
}


def check_policy(name: str) -> None:
    """Raises ConfigError that lists the names where ``name`` is none of them."""
    if name not in POLICIES:
        raise ConfigError(f"{_FLAG} is {name!r}; it must be one of {', '.join(POLICIES)}", param=_FLAG)


def make_policy(name: str, plan: ArenaPlan, cost: PrefillCost, clock: Clock) -> Policy:
    """The policy called ``name`` for a memory of geometry ``plan``. A model without recurrent layers has no
    checkpoints to choose among: its KV goes by recency, whatever the name. Where states or KV may be
    compressed, their bytes are those they have then: before any is evicted, it is compressed."""
    check_policy(name)
    if plan.compressed_pages:
        plan = replace(plan, slot_stride_bytes=plan.compressed_bytes)
    if plan.compressed_kv_bytes:
        plan = replace(plan, page_bytes=plan.compressed_kv_bytes)
    return POLICIES[name](plan, cost, clock) if plan.slots_per_frame else LeastRecentlyUsed()
