"""The counters of the prefix cache, since the start. ``cache`` adds to them, and ``/metrics`` shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounts:
    """Since the start; they only grow. ``lost_*`` are tokens that an opened sequence could not use, by reason
    (``values.Lost``). Leases that load are not counted as opened."""

    opened: int = 0
    hits: int = 0
    hit_tokens: int = 0
    lost_no_checkpoint: int = 0
    lost_evicted_state: int = 0
    lost_evicted_kv: int = 0
    lost_not_ready: int = 0
    lost_salt: int = 0
    lost_stored: int = 0
    lost_damaged: int = 0
    lost_store_busy: int = 0
    published: int = 0
    evicted_states: int = 0
    """Tails included."""
    evicted_pages: int = 0
    """Bare KV, and one page for each tail."""
    evicted_tails: int = 0
    """Checkpoints inside a page, where a request had ended."""
    compressed: int = 0
    """Checkpoints that were compressed."""
    restored: int = 0
    """Leases that opened on a compressed checkpoint."""
    compressed_pages: int = 0
    """Pages of KV that were compressed."""
    restored_pages: int = 0
    """Compressed pages that were unpacked again."""
    hits_inexact: int = 0
    """Leases that opened on data that was compressed once, or was computed from such data."""
    loaded: int = 0
    """Checkpoints that came from a store."""
    loaded_tokens: int = 0
    """Tokens that those checkpoints added to what the cache had."""


STORE_COUNTS = frozenset({"lost_stored", "lost_damaged", "lost_store_busy", "loaded", "loaded_tokens"})
"""Counters that stay 0 without a store."""
