"""The engines of one model, built from the flags of a server: ``new_fleet`` for a pinned model, one that is loaded on
demand, and a batch.

    ServerConfig   --replicas, --roles, --router, --record, --listen-engines, limits   -->  Fleet
    EngineConfig   the model and how it is computed
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path

from weft.config import EngineConfig
from weft.fleet.fleet import Fleet
from weft.kv_events import read_config
from weft.router.choice import make_router
from weft.router.protocol import Router
from weft.rpc.client import ASSEMBLE
from weft.rpc.link import LinkKeys, own_address
from weft.rpc.messages import ANYWHERE, HostShare, PeerKeys, RecordingTarget
from weft.server.config import ServerConfig

ALL_HOSTS = ("", "0.0.0.0", "[::]", "*")
"""Hosts of an address that mean all addresses of this machine."""


def new_fleet(
    engine: EngineConfig,
    config: ServerConfig,
    *,
    factory: str = ASSEMBLE,
    place: HostShare = ANYWHERE,
    record_as: str = "",
    link: tuple[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Fleet:
    """Return engines that are not started. ``place``: the part of the machine that the engines divide. ``record_as``:
    the model's part of the name of the recording. ``link``: the address where machines join, and the token. Raise
    ConfigError."""
    return Fleet(
        engine,
        replicas=config.own_replicas,
        restarts=config.restarts,
        factory=factory,
        record=_named(config.recording(), record_as),
        stall_after_s=config.stall_after,
        on_progress=on_progress,
        router=_router(config),
        place=place,
        roles=config.replica_roles(),
        peers=None if link is None else PeerKeys(_peer_host(link[0]), 0, link[1]),
        kv_events=None if config.kv_events_config is None else read_config(config.kv_events_config),
        listen=None if link is None else (link[0], LinkKeys.of(link[1])),
    )


def _router(config: ServerConfig) -> Router | None:
    """Return the router; None with one replica if no other can join: there is no choice, and the engine reports no
    snapshots."""
    grows = config.listen_engines is not None or config.ray is not None
    return make_router(config.router, time.monotonic) if grows or config.own_replicas > 1 else None


def _peer_host(address: str) -> str:
    """Return the host at which engines of other machines reach the engines of this one: the host of ``address``, where
    machines join. A host that means all addresses of this machine is replaced by the one that faces the network."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return own_address() if host in ALL_HOSTS else host


def _named(record: RecordingTarget | None, model: str) -> RecordingTarget | None:
    """Return the recording of a model that is loaded on demand: FILE.MODEL.jsonl."""
    if record is None or not model:
        return record
    file = Path(record.file)
    slug = re.sub(r"[^\w.-]+", "-", model).strip(".") or "model"
    return dataclasses.replace(record, file=str(file.with_name(f"{file.stem}.{slug}{file.suffix}")))
