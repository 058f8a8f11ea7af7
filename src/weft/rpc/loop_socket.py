"""A ZeroMQ socket on the event loop: one callback for each burst of messages, and sends that never wait.

    message arrives --> descriptor readable --> _look: is there a message? --> wakes receive()
    receive()           takes messages without waiting while there are some; yields after BURST
    send()              at once; the queue has no bound

ZeroMQ's descriptor is readable when something may have changed, not while messages wait. Reading ZMQ_EVENTS
resets it, and so does each send or receive on the way. ``zmq.asyncio`` makes a future and several calls for
each message: a tenth of the CPU time of a token (decision 0032).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

BURST = 64
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
"""Integer values of Enum flags, whose use would cost more than the call."""


class LoopSocket:
    """A ZeroMQ socket on the event loop. ``socket``: bound or connected; this object then owns it. Construct it on the
    running event loop. Only one task may receive."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None
        self._burst = 0
        self._will_look = False
        """Whether ``_look`` is scheduled after the sends of this turn of the event loop."""
        self._descriptor: int = socket.FD
        self._loop.add_reader(self._descriptor, self._look)

    async def receive(self) -> list[bytes]:
        """Return the parts of the next message."""
        if self._burst == BURST:
            self._burst = 0
            await asyncio.sleep(0)
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._burst = 0
                self._arrival = self._loop.create_future()
                try:
                    await self._arrival
                finally:
                    self._arrival = None
            else:
                self._burst += 1
                return parts

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message without waiting; do nothing after ``close``. Raise zmq.Again if the queue is bounded and
        full."""
        if self._socket.closed:
            return
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        if self._arrival is not None and not self._will_look:
            self._will_look = True
            self._loop.call_soon(self._look)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)

    def _look(self) -> None:
        """Read the state of the socket, which resets the descriptor."""
        self._will_look = False
        if self._socket.closed:
            return
        has_message = int(self._socket.getsockopt(_EVENTS)) & _POLLIN
        if has_message and self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
