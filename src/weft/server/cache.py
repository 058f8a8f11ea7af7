"""GET /v1/cache: what the prefix cache holds and what it has done, in sizes and counts.

No text, no tokens, no names of tenants: nothing that says what anybody asked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from weft.memory.memory import MemoryUsage


def cache_report(usage: MemoryUsage) -> dict[str, Any]:
    """``states`` are checkpoints, ``pages`` of 16 tokens; ``read_now``: pages that running requests read.
    ``counts`` are since the start; what they mean is at ``weft.memory.cache.CacheCounts``."""
    return {
        "object": "cache",
        "bytes": usage.cached_bytes,
        "share": usage.cached_bytes / usage.arena_bytes if usage.arena_bytes else 0.0,
        "evictable_bytes": usage.evictable_bytes,
        "nodes": usage.cache_nodes,
        "pages": usage.pages_cached,
        "pages_read_now": usage.pages_shared,
        "states": usage.slots_cached,
        "counts": dataclasses.asdict(usage.cache),
    }
