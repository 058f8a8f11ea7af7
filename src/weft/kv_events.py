"""KV events: the blocks and states that a prefix cache gets and loses, in the form of vLLM's ``kv_events``.

    batch    [ts, [event, ...], rank]       msgpack; a PUB socket sends (topic, number of the batch, batch)
    event    BlockStored    group 0, full_attention: KV of whole pages      group 1, mamba: one recurrent state
             BlockRemoved   of one group
             AllBlocksCleared

A *hash* names a prefix: the digest of its whole pages (``weft.prefix_digests``). For a state inside a page, the page is
filled up with PAD. A block and the state at its end have the same hash, as in vLLM; the group tells them apart. Readers
of attention skip groups that are not ``full_attention``.

Field names and order are vLLM's, so that its readers decode events as they are. Token ids are unsigned: the
negative keys of pictures (``weft.pictures``) become numbers from 2**31 on.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from weft.errors import ConfigError

FLAG = "--kv-events-config"
ATTENTION_GROUP, STATE_GROUP = 0, 1
ATTENTION_KIND, STATE_KIND = "full_attention", "mamba"
MEDIUM = "GPU"
"""Name of the engine's memory, on CPUs too: readers take it for the first tier."""
STEPS_MAX = 1_000_000
"""Most batches kept for replay."""
MESSAGES_MAX = 10_000_000
"""Most messages that wait for a slow subscriber."""
TOPIC_MAX = 256
_TCP = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})")
_IPC = re.compile(r"ipc://[^\s]+")
_OWN_QUEUE = "events are sent by the step that makes them, so there is no queue: leave it out"


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks or a state that the cache got. ``token_ids``: of all blocks; for a state, of its last page, which may be
    partly filled. ``extra_keys``: for each block, name and digest of the adapter, and for the first block the
    ``cache_salt``."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """The publisher begins again: the following events describe its complete cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A batch of events. ``ts``: seconds since 1970."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class KvEventStats(msgspec.Struct, frozen=True):
    """Counts since the start. ``resets``: how often everything was published again."""

    batches: int = 0
    events: int = 0
    replays: int = 0
    resets: int = 0


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of ``--kv-events-config``, with vLLM's names and defaults. ``endpoint`` is bound if it contains ``*`` or
    ``::`` or is ``ipc://``, else connected. ``hwm``: messages that wait for a slow subscriber."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""

    def of_rank(self, rank: int) -> KvEventsConfig:
        """Return the config of engine ``rank``, whose ports are larger by ``rank``. Raise ConfigError for a port out of
        range."""
        replay = None if self.replay_endpoint is None else _of_rank(self.replay_endpoint, rank)
        return msgspec.structs.replace(self, endpoint=_of_rank(self.endpoint, rank), replay_endpoint=replay)


def read_config(text: str) -> KvEventsConfig | None:
    """Return the config in ``text`` (JSON); None if it turns events off. Raise ConfigError."""
    try:
        fields: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _wrong(f"is not JSON: {error}") from None
    if isinstance(fields, dict) and "max_queue_size" in fields:
        raise _wrong(f"has max_queue_size; {_OWN_QUEUE}")
    try:
        config = msgspec.convert(fields, KvEventsConfig)
    except msgspec.ValidationError as error:
        raise _wrong(f"is not valid: {error}") from None
    return _checked(config)


def _checked(config: KvEventsConfig) -> KvEventsConfig | None:
    if config.publisher not in (None, "null", "zmq"):
        raise _wrong(f"has publisher {config.publisher[:40]!r}; it may be zmq or null")
    if not config.enable_kv_cache_events:
        if config.publisher == "zmq":
            raise _wrong("has publisher zmq without enable_kv_cache_events true, so nothing would be published")
        return None
    if config.publisher == "null":
        return None
    for name, value, most in (("buffer_steps", config.buffer_steps, STEPS_MAX), ("hwm", config.hwm, MESSAGES_MAX)):
        if not 1 <= value <= most:
            raise _wrong(f"has {name} {value}; it must be at least 1 and at most {most}")
    if len(config.topic.encode()) > TOPIC_MAX:
        raise _wrong(f"has a topic of {len(config.topic.encode())} bytes; the limit is {TOPIC_MAX}")
    config.of_rank(0)
    if config.replay_endpoint is not None and not binds(config.replay_endpoint):
        raise _wrong(
            f"has replay_endpoint {config.replay_endpoint!r}, and subscribers connect to it: "
            "it is tcp://*:PORT, tcp://[::1]:PORT or ipc://PATH"
        )
    if config.replay_endpoint == config.endpoint:
        raise _wrong(f"has {config.endpoint!r} as endpoint and as replay_endpoint; they are two sockets")
    return config


def binds(endpoint: str) -> bool:
    """Return whether a publisher listens at ``endpoint``; to others it connects, as vLLM does."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def host_of(endpoint: str) -> str | None:
    """Return the host of a TCP address, ``*`` for all; None for an address of this machine only."""
    parts = _TCP.fullmatch(endpoint)
    return None if parts is None else parts["host"].strip("[]")


def _of_rank(endpoint: str, rank: int) -> str:
    if _IPC.fullmatch(endpoint):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    parts = _TCP.fullmatch(endpoint)
    if parts is None:
        raise _wrong(f"has endpoint {endpoint[:200]!r}; it is tcp://HOST:PORT or ipc://PATH")
    port = int(parts["port"])
    if not 0 < port + rank <= 65535:
        raise _wrong(f"gives engine {rank} the port {port + rank} ({endpoint}); ports are 1 to 65535")
    return f"tcp://{parts['host']}:{port + rank}"


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"{FLAG} {what}", param=FLAG)
