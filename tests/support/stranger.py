"""A connection to a ZeroMQ port with CURVE that has no key and sends much."""

from __future__ import annotations

import contextlib
import socket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def taken_of_a_stranger(port: int, *, frame_bytes: int) -> int:
    """Return the bytes of one frame that the port takes from a connection without a key; 64 MiB at most."""
    taken = 0
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(GREETING)
        stranger.recv(64, socket.MSG_WAITALL)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"\x06" + frame_bytes.to_bytes(8, "big"))
            while taken < 64 << 20:
                taken += stranger.send(bytes(1 << 20))
    return taken
