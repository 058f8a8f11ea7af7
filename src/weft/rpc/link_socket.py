"""What the sockets of both ends of a link share: addresses, bounds, and how fast a dead one is noticed.

ZeroMQ's heartbeat closes connections that carry nothing, so that a connection over a cut network is opened
again. It proves that a kernel lives. Whether the process does is what ``LinkBeat`` is for.
"""

from __future__ import annotations

import zmq
import zmq.asyncio

from weft.errors import ConfigError
from weft.rpc.link_messages import BEAT_S, SILENT_S

FRAME_BYTES_MAX = 1 << 30
_PORT_MAX = 65535
_QUEUED_FRAMES_MAX = 20_000
"""To a machine that does not read; beyond it frames are lost, which ends its session."""


def link_options(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENT_S * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(SILENT_S * 1000))
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, _QUEUED_FRAMES_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES_MAX)
    socket.setsockopt(zmq.IPV6, 1)


def tcp_address(text: str, *, flag: str) -> str:
    """``HOST:PORT`` as ZeroMQ writes it. Raises ConfigError that names ``flag``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ConfigError(f"{flag} {text}: it is HOST:PORT, such as 10.0.0.1:8100 or [::]:8100", param=flag)
    return f"tcp://{host}:{port}"
