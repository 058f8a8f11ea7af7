"""Frames between a server and a joined machine: numbered, so that a late, doubled or lost one is noticed.

    | epoch | number | life | kind |  body (msgpack)
       8        8       4      1        bytes

    epoch     the session; the server counts sessions up and never uses a number again
    number    of the frame in its direction of the session, from 0
    life      which engine process of the session the frame speaks of or comes from

A frame of another epoch is late: its session was given up, and its requests go on elsewhere. A frame with a
number below the expected one was doubled. Both are dropped. A number above the expected one means that a
frame was lost. A session with a gap is given up as a whole, because a lost token or a lost request cannot be
repaired from here. Beats are numbered too, so a lost last frame is noticed with the next beat.

TCP delivers each connection in order, and ZeroMQ opens new connections without a word. The numbers are what
holds over both.

Rejected: acknowledgements and repetition (a second TCP; a resume costs one prefill and is proven already);
a checksum (CURVE authenticates each frame).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from weft.errors import WeftError

_HEADER = struct.Struct("<QQIB")
HEADER_BYTES = _HEADER.size
NO_EPOCH = 0
"""Of frames before a session: Hello, Welcome, and a refusal."""


class BodyKind(IntEnum):
    """What a body is: a message of ``link_messages``, or one of ``weft.rpc.messages`` as it came."""

    LINK = 0
    ENGINE = 1


class FrameGapError(WeftError):
    """A frame of the session was lost."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    epoch: int
    number: int
    life: int
    kind: BodyKind

    def pack(self) -> bytes:
        return _HEADER.pack(self.epoch, self.number, self.life, self.kind)

    @classmethod
    def unpack(cls, raw: bytes) -> FrameHeader | None:
        """None for bytes that are no header."""
        if len(raw) != HEADER_BYTES:
            return None
        epoch, number, life, kind = _HEADER.unpack(raw)
        return cls(epoch, number, life, BodyKind(kind)) if kind in tuple(BodyKind) else None


class FrameNumbers:
    """Both directions of one session at one of its ends."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._next_sent = 0
        self._next_received = 0

    def header(self, kind: BodyKind, life: int) -> bytes:
        """Of the next frame to send."""
        header = FrameHeader(self.epoch, self._next_sent, life, kind)
        self._next_sent += 1
        return header.pack()

    def accepts(self, header: FrameHeader) -> bool:
        """False for a frame to drop: late or doubled. Raises FrameGapError for one that shows a loss."""
        if header.epoch != self.epoch or header.number < self._next_received:
            return False
        if header.number > self._next_received:
            raise FrameGapError(f"{header.number - self._next_received} frames were lost on the way")
        self._next_received += 1
        return True
