"""GET /v1/cache: contents and work of the prefix cache, in sizes, counts and ages.

The report has no tokens and no names of tenants, and text only with ``server.show_text``. Changing numbers still show
that requests arrive, so with ``--operator-key`` the report is for operators only (``gate``).

To answer, the engine visits every node of its tree between two steps. ``Looks`` bounds that to once in
LOOK_EVERY_S, for any number of requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.costs.step import StepCost
from weft.engine.stats import EngineStats
from weft.errors import EngineUnavailableError
from weft.fleet.fleet import Fleet
from weft.memory.usage import STORE_COUNTS, CacheShape, MemoryUsage, PrefixShape, ShapeSum, SizeClass
from weft.router.protocol import RouterCounts

LOOK_EVERY_S = 1.0
EngineShapes = list[tuple[int, CacheShape]]
"""Shape of the cache by number of the replica."""
_LABEL_KEY = secrets.token_bytes(16)
"""Random key of this process for labels of prefixes: a text cannot be guessed from a label."""
TextOf = Callable[[Sequence[int]], str]


class Looks:
    """Looks at the caches of ``fleet``. Raises the errors of ``fleet``."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._one_asks = asyncio.Lock()
        self._seen: tuple[float, EngineShapes] | None = None

    async def shapes(self) -> EngineShapes:
        """Return the shapes, at most LOOK_EVERY_S old."""
        async with self._one_asks:
            if self._seen is None or time.monotonic() - self._seen[0] > LOOK_EVERY_S:
                self._seen = time.monotonic(), await self.fleet.engines.cache_shapes()
            return self._seen[1]


def memory_bytes(usage: MemoryUsage) -> dict[str, int]:
    """Return the bytes of the arena by use; they add up to it. In order: KV and states of single running sequences;
    cached KV that running sequences read; cached KV and states that may be evicted; free bytes in frames of one kind;
    bytes free for either kind."""
    page_bytes = usage.page_bytes // max(usage.pages_held, 1)
    slot_bytes = usage.slot_bytes // max(usage.slots_held, 1)
    return {
        "running_kv": (usage.pages_held - usage.pages_cached) * page_bytes,
        "running_states": (usage.slots_held - usage.slots_cached) * slot_bytes,
        "shared_kv": usage.pages_shared * page_bytes,
        "cached_kv": (usage.pages_cached - usage.pages_shared) * page_bytes - usage.compressed_bytes,
        "cached_states": usage.slots_cached * slot_bytes + usage.compressed_bytes,
        "open": usage.open_bytes,
        "free": usage.free_bytes,
    }


def cache_reports(
    engines: Sequence[tuple[int, EngineStats, CacheShape]],
    *,
    several: bool = False,
    router: Mapping[int, RouterCounts] | None = None,
    text_of: TextOf | None = None,
) -> dict[str, Any]:
    """Return ``cache_report`` of the only replica. With ``several``, return the sum, and in ``replicas`` the report of
    each replica that answers. ``store``: contents and work of a replica's store. ``router``: the router's figures of
    each replica. Raise EngineUnavailableError if no replica answers: an engine may have ended meanwhile."""
    reports = [
        (number, cache_report(stats.memory, shape, costs=stats.costs, text_of=text_of))
        for number, stats, shape in engines
    ]
    if not reports:
        raise EngineUnavailableError("no engine serves at the moment")
    further = [_beside(stats, (router or {}).get(number)) for number, stats, _ in engines]
    if not several:
        return {**reports[0][1], **further[0]}
    return {
        **_added([report for _, report in reports]),
        "replicas": [
            {"replica": number, **report, **more} for (number, report), more in zip(reports, further, strict=True)
        ],
    }


def _beside(stats: EngineStats, counts: RouterCounts | None) -> dict[str, Any]:
    parts: dict[str, Any] = {} if stats.store is None else {"store": dataclasses.asdict(stats.store)}
    return parts if counts is None else {**parts, "router": dataclasses.asdict(counts)}


def _added(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of reports. Numbers add up, except shares and ages. Salts are counted per replica."""
    first, count = reports[0], len(reports)
    total: dict[str, Any] = {
        name: sum(report[name] for report in reports) if isinstance(value, int) else value
        for name, value in first.items()
    }
    total["share"] = sum(report["share"] for report in reports) / count
    for name in ("memory_bytes", "counts", "moves"):
        total[name] = {key: sum(report[name].get(key, 0) for report in reports) for key in first[name]}
    trees = [report["tree"] for report in reports]
    prefixes = sorted(
        (prefix for tree in trees for prefix in tree["prefixes"]), key=lambda prefix: float(prefix["age_s"])
    )
    total["tree"] = {
        "salts": [],
        "salt_count": max(tree["salt_count"] for tree in trees),
        "by_depth": _added_classes([tree["by_depth"] for tree in trees]),
        "by_length": _added_classes([tree["by_length"] for tree in trees]),
        "prefixes": prefixes[: max(len(tree["prefixes"]) for tree in trees)],
        "cut_off": any(tree["cut_off"] for tree in trees),
    }
    return total


def _added_classes(lists: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    by_size: dict[int, dict[str, Any]] = {}
    for row in (row for rows in lists for row in rows):
        known = by_size.setdefault(
            row["tokens_max"],
            dict.fromkeys(row, 0) | {"tokens_max": row["tokens_max"], "youngest_s": row["youngest_s"]},
        )
        for name, value in row.items():
            if name == "youngest_s":
                known[name] = min(known[name], value)
            elif name == "oldest_s":
                known[name] = max(known[name], value)
            elif name != "tokens_max":
                known[name] += value
    return [by_size[size] for size in sorted(by_size)]


def cache_report(
    usage: MemoryUsage, shape: CacheShape, *, costs: StepCost | None = None, text_of: TextOf | None = None
) -> dict[str, Any]:
    """Return the report of one replica. ``states`` are snapshots, ``states_compressed`` of them in 8 bits in
    ``compressed_bytes`` of pages; ``pages`` of 16 tokens; ``read_now``: pages that running requests read;
    ``pages_compressed``: of KV, in ``compressed_kv_dtype`` and in ``compressed_kv_bytes`` of the pages. ``inexact``
    nodes have KV or a state that was compressed once, or that was computed from compressed values. ``counts`` are since
    the start (``weft.memory.prefix.cache.CacheCounts``); ``tree`` is described at ``weft.memory.prefix.readings``."""
    counts = usage.cache.numbers()
    if not counts["lost_salt"]:  # not counted without debug.count_salt, and 0 would mean that there is none
        del counts["lost_salt"]
    if not usage.cache.loaded:
        counts = {name: count for name, count in counts.items() if count or name not in STORE_COUNTS}
    return {
        "object": "cache",
        "bytes": usage.cached_bytes,
        "share": usage.cached_bytes / usage.arena_bytes if usage.arena_bytes else 0.0,
        "evictable_bytes": usage.evictable_bytes,
        "memory_bytes": memory_bytes(usage),
        "nodes": usage.cache_nodes,
        "pages": usage.pages_cached,
        "pages_read_now": usage.pages_shared,
        "states": usage.slots_cached + usage.states_compressed,
        "states_compressed": usage.states_compressed,
        "compressed_bytes": usage.compressed_bytes,
        "pages_compressed": usage.pages_compressed,
        "compressed_kv_bytes": usage.compressed_kv_bytes,
        "compressed_kv_dtype": usage.compressed_kv_dtype,
        "counts": counts,
        "moves": dataclasses.asdict(usage.moves),
        "tree": {
            "salts": [{"number": entry.number, "salted": entry.salted, **_sum(entry.total)} for entry in shape.salts],
            "salt_count": shape.salt_count,
            "by_depth": _classes(shape.depths),
            "by_length": _classes(shape.lengths),
            "prefixes": [_prefix(entry, costs, text_of) for entry in shape.prefixes],
            "cut_off": shape.cut_off,
        },
    }


def _prefix(prefix: PrefixShape, costs: StepCost | None, text_of: TextOf | None) -> dict[str, Any]:
    """Return the figures of a prefix. ``saved_s``: seconds that the reused tokens would have taken to compute, as the
    engine prices them; None until it has measured enough."""
    row = {**dataclasses.asdict(prefix), "age_s": round(prefix.age_s, 1), "saved_s": None}
    if costs is not None:
        # Attention is quadratic in the length of a prompt, so each hit is priced at its own length.
        mean_tokens = prefix.tokens_saved // max(prefix.hits, 1)
        row["saved_s"] = prefix.hits * costs.prefill_s(0, mean_tokens)
    head = row.pop("head")
    label = hashlib.blake2b(row.pop("digest").encode(), key=_LABEL_KEY, digest_size=4).hexdigest()
    row = {"label": label, **row}
    return row if text_of is None else {**row, "text": text_of(head)}


def _classes(classes: list[SizeClass]) -> list[dict[str, Any]]:
    return [{"tokens_max": size_class.tokens_max, **_sum(size_class.total)} for size_class in classes]


def _sum(total: ShapeSum) -> dict[str, Any]:
    return {**dataclasses.asdict(total), "youngest_s": round(total.youngest_s, 1), "oldest_s": round(total.oldest_s, 1)}
