"""``KvEventFeed``: the KV events of one engine on ZMQ sockets, in vLLM's form, with batches kept for replay.

    step --> BlockFollower.take --> batch n --> PUB: topic | n (8 bytes, big-endian) | msgpack
                                       '------> kept: the last ``buffer_steps`` batches, at most BUFFER_BYTES_MAX

    REQ: 8 bytes, n of the first lost batch --> ROUTER: topic | n | msgpack, ... , then n = -1 and nothing else

The engine's loop sends and answers between two steps: no thread and no queue. A PUB socket never waits: a subscriber
that reads too slowly loses messages, and notices a gap in the numbers. Batches that are no longer kept cannot be
replayed, nor can batches of an earlier engine process. For these the feed publishes everything again, beginning with
AllBlocksCleared, and replays that. So every loss can be repaired. Every start also begins with AllBlocksCleared, as
number 0.

Laws: L3 (a slow subscriber is never an error), L11 (kept batches, waiting messages and known names are bounded).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec
import zmq

from weft.adapters import Adapter
from weft.errors import ConfigError
from weft.kv_events import FLAG, EventBatch, KvEvent, KvEventsConfig, KvEventStats, binds
from weft.memory.memory import Memory

BATCH_EVENTS_MAX = 1024
"""Most events of one batch."""
BUFFER_BYTES_MAX = 256 << 20
REPLAYS_MAX = 16
"""Most replays that are answered between two steps."""
NAMES_MAX = 4096
"""Most adapters whose names are remembered."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_log = logging.getLogger("weft.engine")
_encoder = msgspec.msgpack.Encoder()


class KvEventFeed:
    """The feed of one engine. ``replay``: the socket for a poller, or None. Raises ConfigError if an address is not
    free."""

    def __init__(
        self, memory: Memory, context: zmq.Context[zmq.Socket[bytes]], config: KvEventsConfig, rank: int = 0
    ) -> None:
        self._config, self._rank = config, rank
        self._names: OrderedDict[str, str] = OrderedDict()
        self._follower = memory.follow_blocks(lambda digest: self._names.get(digest, digest))
        self.number = 0
        """Number of the next batch."""
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_bytes = 0
        self._batches = self._events = self._replays = self._resets = 0
        self._publisher = _socket(context, zmq.PUB, config.endpoint, config.hwm)
        self.replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            waiting_max = 2 * (config.buffer_steps + 1)  # a complete replay fits, with its end
            self.replay = _socket(context, zmq.ROUTER, config.replay_endpoint, waiting_max)
        self._publish(self._follower.everything())

    def stats(self) -> KvEventStats:
        return KvEventStats(self._batches, self._events, self._replays, self._resets)

    def name(self, adapter: Adapter) -> None:
        """Remember the name of ``adapter`` for the blocks that it computes."""
        self._names[adapter.digest] = adapter.name
        self._names.move_to_end(adapter.digest)
        if len(self._names) > NAMES_MAX:
            self._names.popitem(last=False)

    def publish(self) -> None:
        """Send the changes since the last call, if there are any."""
        events = self._follower.take()
        if events:
            self._publish(events)

    def answer(self) -> None:
        """Answer the replays that subscribers asked for, without waiting."""
        if self.replay is None:
            return
        for _ in range(REPLAYS_MAX):
            try:
                frames = self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and len(frames[2]) == 8:
                self._replay(self.replay, frames[0], int.from_bytes(frames[2], "big"))
            else:
                _log.debug("a replay of KV events was asked for in %d frames, not 3", len(frames))

    def _replay(self, socket: zmq.Socket[bytes], client: bytes, first: int) -> None:
        self._replays += 1
        batches: Iterable[tuple[int, bytes]] = [batch for batch in self._buffer if batch[0] >= first]
        if first > self.number or (first < self.number and first < self._buffer[0][0]):
            self._resets += 1
            batches = self._publish(self._follower.everything())
        topic = self._config.topic.encode()
        with contextlib.suppress(zmq.Again):  # a subscriber that does not read loses its replay
            for number, payload in batches:
                socket.send_multipart([client, b"", topic, number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            socket.send_multipart([client, b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)

    def _publish(self, events: Iterable[KvEvent]) -> list[tuple[int, bytes]]:
        """Send ``events`` in batches; return their numbers and payloads."""
        sent, rest = [], iter(events)
        while part := list(islice(rest, BATCH_EVENTS_MAX)):
            payload = _encoder.encode(EventBatch(time.time(), part, self._rank))
            number, self.number = self.number, self.number + 1
            self._publisher.send_multipart([self._config.topic.encode(), number.to_bytes(8, "big"), payload])
            sent.append((number, payload))
            self._keep(number, payload)
            self._batches += 1
            self._events += len(part)
        return sent

    def _keep(self, number: int, payload: bytes) -> None:
        self._buffer.append((number, payload))
        self._buffer_bytes += len(payload)
        while len(self._buffer) > self._config.buffer_steps or (
            self._buffer_bytes > BUFFER_BYTES_MAX and len(self._buffer) > 1
        ):
            self._buffer_bytes -= len(self._buffer.popleft()[1])


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: Any, endpoint: str, waiting_max: int) -> zmq.Socket[bytes]:
    """Return a socket at ``endpoint``. Raise ConfigError."""
    socket = context.socket(kind)
    socket.set_hwm(waiting_max)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        (socket.bind if binds(endpoint) else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"{FLAG}: {endpoint}: {error.strerror}", param=FLAG) from None
    return socket
