"""A store below a replayed memory: the tier of the engine over a disk on the virtual clock.

    --store 1TB@3GB/s@2ms, --store-write --> StoreModel --tier_for--> StoreTier over VirtualStore

Restores, writes, prices and deadlines are those of the engine (``weft.schedule``). Index and eviction are
those of ``DirectoryStore``. Only the disk is a model (``weft.store.virtual_store``).

A store belongs to a node and holds unsharded records: with tensor parallelism its page and its state are
those of all ranks together, a KV head that several ranks hold counted once. The ranks copy their parts at
once, so a step copies as many times the bytes as there are ranks.

Bytes of a load or a store cross the link between a device and its host at LINK_BYTES_S. Their time adds to
the step.

Rejected: a hit rate for each tier from one pass over the trace (a restored prefix enters memory and evicts
another: the tiers are not independent).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weft.costs.restore import RestorePrices
from weft.costs.step import CostModel
from weft.errors import ConfigError
from weft.memory.memory import Memory
from weft.memory.prefix_store import TransferBuffers, Uint8s, buffer_limit
from weft.schedule.store_tier import StoreTier
from weft.schedule.store_writes import GPU_STEP_BYTES
from weft.store.virtual_disk import NO_PACKING, DiskModel, PackingModel
from weft.store.virtual_store import VirtualStore
from weft.units import parse_bytes

LATENCY_S = 1e-3
LINK_BYTES_S = 25e9
"""A PCIe 4 link with 16 lanes."""
_GUESS_TOKENS = 1024
PACKED_SHARES = {"bfloat16": 0.69, "float32": 0.86}
"""Packed bytes over bytes in memory, by dtype. ``benchmarks/store_packing`` measured them on KV and on states
of delta nets, trained and random; these are the worst. Records in other dtypes count as they are."""
PACK_BYTES_S, UNPACK_BYTES_S = 0.3e9, 0.6e9
"""Of one thread, by the same."""
PACK_THREADS = 16
"""Those of a host of 64 cores (``packed_store``)."""
NO_STORE = "none"


@dataclass(frozen=True, slots=True)
class StoreModel:
    """``page_bytes``, ``state_bytes``: of all ``ranks`` together. ``name``: as --store named it."""

    name: str
    disk: DiskModel
    page_bytes: int
    state_bytes: int
    ranks: int = 1
    packing: PackingModel = NO_PACKING


@dataclass(frozen=True, slots=True)
class StoreReport:
    """``fetch_s``: seconds that fetches took, from request to arrival. ``late``: fetches past their deadline.
    ``stored_bytes``: at the end."""

    name: str
    restores: int
    restored_tokens: int
    fetch_s: float
    late: int
    written: int
    dropped: int
    skipped: int
    lost: int
    written_bytes: int
    stored_bytes: int
    evicted: int


def packing_of(kv_dtype: str, state_dtype: str) -> PackingModel:
    """Packing beside a GPU, for records in these dtypes."""
    return PackingModel(PACKED_SHARES.get(kv_dtype, 1.0), PACKED_SHARES.get(state_dtype, 1.0),
                        PACK_THREADS * PACK_BYTES_S, PACK_THREADS * UNPACK_BYTES_S)


def parse_disk(text: str, write_bytes_s: int) -> DiskModel | None:
    """``1TB@3GB/s`` or ``1TB@3GB/s@100us``; None for ``none``. Raises ConfigError that names the flag."""
    if text == NO_STORE:
        return None
    size, at, rate = text.partition("@")
    if not at:
        raise ConfigError(f"--store {text!r} is no store: write its size and its rate, and its latency if "
                          f"that is not {LATENCY_S * 1e3:.0f} ms, for example 1TB@3GB/s or 1TB@3GB/s@100us",
                          param="--store")
    capacity_bytes = parse_bytes(size, flag="--store")
    if capacity_bytes <= 0:
        raise ConfigError(f"--store {text!r}: its size must be above 0", param="--store")
    bytes_s, latency_s = parse_rate(rate)
    return DiskModel(capacity_bytes, bytes_s, latency_s, float(write_bytes_s))


def parse_rate(text: str) -> tuple[float, float]:
    """``3GB/s`` or ``3GB/s@100us``: bytes a second, and seconds of latency. Raises ConfigError."""
    rate, _, latency = text.partition("@")
    bytes_s = parse_bytes(rate.removesuffix("/s"), flag="--store")
    if bytes_s <= 0:
        raise ConfigError(f"--store {text!r}: its rate must be above 0", param="--store")
    return float(bytes_s), _seconds(latency, text) if latency else LATENCY_S


_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _seconds(latency: str, text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(us|ms|s)\s*", latency)
    if match is None:
        raise ConfigError(f"--store {text!r}: {latency!r} is no latency: write a number with us, ms or s, "
                          "for example 100us", param="--store")
    return float(match.group(1)) * _UNITS_S[match.group(2)]


def tier_for(model: StoreModel, memory: Memory, cost: CostModel,
             clock: Callable[[], float]) -> tuple[StoreTier, VirtualStore]:
    """The tier of ``memory``, and the store under it."""
    limit = buffer_limit(memory.plan.arena_bytes * model.ranks)
    scratch_B = np.empty(limit, np.uint8)  # nothing reads or writes it

    def allocate(size_bytes: int) -> Uint8s:
        return scratch_B[:size_bytes]

    buffers = TransferBuffers(model.page_bytes, model.state_bytes, limit_bytes=limit, allocate=allocate)
    exact = not (memory.plan.compressed_pages or memory.plan.compressed_kv_bytes)
    store = VirtualStore(model.disk, clock, queue_bytes=limit, exact=exact, packing=model.packing)
    prices = RestorePrices(cost.prefill_s(0, _GUESS_TOKENS) / _GUESS_TOKENS, read_bytes_s=model.disk.bytes_s,
                           latency_s=model.disk.latency_s, copy_bytes_s=LINK_BYTES_S * model.ranks)
    tier = StoreTier(store, memory, buffers, prices, clock, exact=exact,
                     write_bytes_s=model.disk.write_bytes_s, step_bytes=GPU_STEP_BYTES * model.ranks,
                     stored_share=lambda: store.stored_share)
    return tier, store


def report_of(model: StoreModel, tier: StoreTier, store: VirtualStore) -> StoreReport:
    stats, restores, writes = store.stats(), tier.restores.counts, tier.writes.counts
    return StoreReport(model.name, restores.restores, restores.restored_tokens, store.fetch_s, restores.late,
                       writes.written, writes.dropped, writes.skipped, writes.lost, stats.written_bytes,
                       stats.stored_bytes, stats.evicted)
