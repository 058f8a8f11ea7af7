"""``--store``: the store of a model, and its connection to the arena.

    checkpoint files, sizes, dtypes, kernels  --> NamespaceIdentity     the meaning of the bytes
    --store, --store-size, limits.store_write ...  --> open_store            a directory or bucket
    arena                                     --> TransferBuffers       a quarter of its bytes, within bounds
                                              --> StoreTier             restores and writes of the scheduler

With several ranks, only rank 0 opens the store. Buffers are shared memory then, with a part for each rank.

The identity has everything that determines the meaning of a page and a state: weights, config.json, the layout of
pages and slots, dtypes and the quantised form. It has the kernels, the version of their arithmetic, that of torch, and
on a CPU the threads. Two engines that differ in any of it never read each other's records.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from weft.assemble.weights import WeightsSource
from weft.config import EngineConfig
from weft.costs.restore import COPY_BYTES_S, RestorePrices
from weft.costs.step import given_cost
from weft.errors import ConfigError
from weft.memory.frames.plan import ArenaPlan
from weft.memory.memory import Memory
from weft.memory.prefix_store import (
    EXACT_FORM,
    INT4_KV,
    INT8_KV,
    INT8_STATE,
    PACKED,
    BufferPlaces,
    Store,
    TransferBuffers,
    buffer_limit,
)
from weft.ranks.messages import RankMemory
from weft.ranks.shared_buffers import SharedBuffers, new_memory
from weft.schedule.store_tier import StoreTier
from weft.schedule.store_writes import GPU_STEP_BYTES, STEP_BYTES
from weft.store import identity, packing
from weft.store.identity import NamespaceIdentity, canonical_json
from weft.store.opening import StoreOptions
from weft.store.packed_store import PackedStore
from weft.store.peer_store import NO_STORE, PeerStore
from weft.store.renewable_store import RenewableStore
from weft.store.sealing import read_sealer
from weft.store.tiered_store import open_store
from weft.units import CHUNK_TOKENS, format_bytes, parse_byte_rate, parse_bytes

if TYPE_CHECKING:
    import torch

    from weft.models.loading import LoadedModel
    from weft.ranks.executor import RankedExecutor
    from weft.tensor.gpu.host_memory import HostRoom

CPU_FLOPS_THREAD = 4e10
GPU_FLOPS = 2e14
"""Floating-point operations a second of a thread and of a GPU: guesses until prefills are measured."""
GPU_LINK_BYTES_S = 25e9
"""Bytes a second: a PCIe 4 link with 16 lanes."""


def open_tier(
    config: EngineConfig,
    name: str,
    source: WeightsSource,
    loaded: LoadedModel,
    memory: Memory,
    *,
    kernels: str,
    threads: int,
    device: torch.device,
    clock: Callable[[], float],
    ranks: RankedExecutor | None = None,
    fp8_scales: Callable[[], Sequence[object]] = tuple,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[StoreTier, list[str]]:
    """Return the tier of ``config.store`` and of handoffs, which send ``chunk_tokens`` at once; and notes for the
    user. ``ranks``: the other ranks, which copy their parts of each record. ``fp8_scales``: scales of pages in fp8,
    which are stored outside of the pages. Raises ConfigError that names the directory.
    """
    arena, options = memory.plan, _options(config)
    buffers = _buffers(arena, device, ranks)
    limit = buffers.limit_bytes
    weights_bytes = loaded.weights_bytes
    host_threads = 0 if device.type == "cuda" else threads
    sealer = read_sealer(config.session_key)
    key = {} if sealer is None else {identity.KEY: sealer.key_id}
    owner_now = _identities(
        config, name, source, loaded, arena, buffers, kernels, fp8_scales, threads=host_threads, key=key
    )
    owner = owner_now()
    if config.store_pack == "on" and not packing.is_available():
        raise ConfigError(
            "debug.store_pack on needs the package zstandard: pip install 'weft[store]'", param="debug.store_pack"
        )
    packs = config.store_pack == "on" or (config.store_pack == "auto" and device.type == "cuda")

    def open_below(owner: NamespaceIdentity) -> Store:
        if config.store is None:
            return NO_STORE
        opened = open_store(
            config.store,
            owner,
            replace(
                options,
                queue_bytes=limit,
                forms=_forms(config, arena),
                cache_directory=config.store_cache,
                key_file=config.store_key,
                required=config.store_required,
                pinned=lambda: ((prefix.salt, prefix.tokens) for prefix in memory.pins),
                sealer=sealer,
            ),
        )
        if not packing.is_available():
            return opened
        return PackedStore(opened, buffers.page_bytes, buffers.slot_bytes, queue_bytes=limit, packs=packs)

    stored = RenewableStore(open_below(owner))
    store: Store = stored
    flops = GPU_FLOPS if device.type == "cuda" else threads * CPU_FLOPS_THREAD
    copy_bytes_s = GPU_LINK_BYTES_S if device.type == "cuda" else COPY_BYTES_S
    peers: PeerStore | None = None
    if config.handoffs:
        store = peers = PeerStore(
            store,
            owner.digest,
            page_bytes=buffers.page_bytes,
            state_bytes=buffers.slot_bytes,
            chunk_tokens=chunk_tokens,
            inbox_bytes=limit,
            clock=clock,
        )
    given_costs = given_cost(config.step_costs)
    token_s = weights_bytes / flops if given_costs is None else given_costs.token_s
    prices = RestorePrices(token_s, copy_bytes_s=copy_bytes_s)
    tier = StoreTier(
        store,
        memory,
        buffers,
        prices,
        clock,
        exact=config.exact,
        write_bytes_s=options.write_bytes_per_second,
        step_bytes=GPU_STEP_BYTES if device.type == "cuda" else STEP_BYTES,
        compressed=config.tp == 1,
        stored_share=lambda: stored.below.stored_share if isinstance(stored.below, PackedStore) else 1.0,
        orders=peers,
    )
    if peers is not None:
        tier.link_stats = peers.link_stats

    def renew() -> None:
        owner = owner_now()
        if peers is not None:
            peers.renew(owner.digest)
        stored.renew(lambda: open_below(owner))

    tier.renew = renew
    return tier, [] if config.store is None else _notes(config.store, tier)


def _options(config: EngineConfig) -> StoreOptions:
    size = None if config.store_size is None else parse_bytes(config.store_size, flag="--store-size")
    rate = parse_byte_rate(config.store_write, flag="limits.store_write")
    reserve = parse_bytes(config.store_reserve, flag="limits.store_reserve")
    return StoreOptions(
        capacity_bytes=size, write_bytes_per_second=float(rate), reserve_bytes=reserve, accept_inexact=not config.exact
    )


def _buffers(arena: ArenaPlan, device: torch.device, ranks: RankedExecutor | None) -> TransferBuffers:
    limit = buffer_limit(arena.arena_bytes * (1 if ranks is None else ranks.peers.size))
    if ranks is not None:
        return SharedBuffers(
            arena.page_bytes,
            arena.slot_bytes,
            ranks=ranks.peers.size,
            limit_bytes=limit,
            share=ranks.peers.share,
            tell=ranks.peers.tell,
            room=_shared_room(limit, device, ranks) if device.type == "cuda" else None,
        )
    if device.type != "cuda":
        return TransferBuffers(arena.page_bytes, arena.slot_bytes, limit_bytes=limit)
    from weft.tensor.gpu.host_memory import room_for

    room = room_for(device, limit)
    return TransferBuffers(arena.page_bytes, arena.slot_bytes, limit_bytes=limit, allocate=room.take, release=room.give)


def _shared_room(size: int, device: torch.device, ranks: RankedExecutor) -> HostRoom:
    """Return one mapping, which every rank pins now."""
    from weft.tensor.gpu.host_memory import CudaPin, HostBuffer, HostRoom

    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = new_memory(size)
    try:
        ranks.peers.share(RankMemory(size), descriptor)
        return HostRoom(HostBuffer(size, CudaPin(device), mmap.mmap(descriptor, size)), ranks.fence)
    finally:
        os.close(descriptor)


def _forms(config: EngineConfig, arena: ArenaPlan) -> frozenset[int]:
    """Return the forms of records that this engine reads. Codes extend across pages, so a record of several ranks has
    none.
    """
    exact = {EXACT_FORM, PACKED} if packing.is_available() else {EXACT_FORM}
    if config.exact or config.tp > 1:
        return frozenset(exact)
    kv_form = INT4_KV if arena.compressed_kv_dtype == "int4" else INT8_KV
    return frozenset(
        {*exact, *({kv_form} if arena.compressed_kv_bytes else ()), *({INT8_STATE} if arena.compressed_pages else ())}
    )


def own_parts(buffers: TransferBuffers) -> BufferPlaces:
    """Return the part of each buffer that this process copies: all of it, or the part of rank 0."""
    return buffers.own if isinstance(buffers, SharedBuffers) else buffers


def _notes(place: str, tier: StoreTier) -> list[str]:
    stats = tier.store.stats()
    count = f"{stats.snapshots:,} snapshots" if stats.snapshots else "nothing"
    others = f", {stats.others:,} snapshots of others" if stats.others else ""
    where = " in the directory in front of it" if "://" in place else ""
    return [
        f"store {place}: {count} of this model{others}{where}, {format_bytes(stats.stored_bytes)} of "
        f"{format_bytes(stats.capacity_bytes)} in use.",
        *stats.notes,
    ]


def _identities(
    config: EngineConfig,
    name: str,
    source: WeightsSource,
    loaded: LoadedModel,
    arena: ArenaPlan,
    buffers: TransferBuffers,
    kernels: str,
    fp8_scales: Callable[[], Sequence[object]],
    *,
    threads: int,
    key: Mapping[str, str],
) -> Callable[[], NamespaceIdentity]:
    """Return a function that returns the present identity: weights may be replaced while the engine runs. ``threads``:
    threads of a CPU, a part of the identity because torch multiplies matrices that are not in tiles and may split sums
    by thread. The number of ranks is a part too, because it changes sums and shards. ``key``: the id of the key of
    records, if there is one.
    """
    architecture, quantised = _plain_json(asdict(loaded.spec)), loaded.weights_form  # and not the model itself
    ranks = {"ranks": config.tp, "experts_by_rank": config.ep} if config.tp > 1 else {}

    def now() -> NamespaceIdentity:
        text = (source.directory / "config.json").read_bytes()
        published: dict[str, Any] = json.loads(text)
        # Without scales in the checkpoint they are measured at start, and two machines may find different ones.
        scales = fp8_scales()
        measured = {"fp8_scales": hashlib.sha256(canonical_json(scales)).hexdigest()} if scales else {}
        return NamespaceIdentity(
            model=name,
            weights=source.digest(),
            architecture=architecture,
            rope={key: value for key, value in published.items() if "rope" in key},
            kv_dtype=arena.kv_dtype,
            state_dtype=config.state_dtype,
            quantised=quantised,
            arithmetic=arithmetic(kernels),
            grain_bytes=buffers.page_bytes,
            state_bytes=buffers.slot_bytes,
            more={
                "config": hashlib.sha256(text).hexdigest(),
                "quantize_inputs": config.quantize_inputs,
                "threads": threads,
                "layout": _plain_json(layout_of(arena)),
                **ranks,
                **measured,
                **key,
            },
        )

    return now


def arithmetic(kernels: str) -> str:
    """Return the versions of the arithmetic: of weft's kernels, and of torch, which computes everything without a
    kernel and may sum in another order in another version.
    """
    import torch

    return f"{kernels} {identity.ARITHMETIC_VERSION}, torch {torch.__version__}"


def layout_of(arena: ArenaPlan) -> dict[str, Any]:
    """Return the positions of the fields of a page and a state. Only the layout ``rows`` is named: before it existed,
    stores had the layout ``vnni`` without a name.
    """
    layout: dict[str, Any] = {
        "page": [asdict(field) for field in arena.kv_fields],
        "slot": [asdict(field) for field in arena.state_fields],
    }
    return layout if arena.kv_layout == "vnni" else layout | {"blocks": arena.kv_layout}


def _plain_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
