"""What a server and a joined machine say to each other, besides what the engine itself says.

    joined machine                                          server
    --------------                                          ------
    Hello          -------------------------------------->  which machine, which weft; before a session
                   <--------------------------------------  Welcome: the epoch of the session; or Dismissal
                   <--------------------------------------  StartEngine: which engine; a running one goes on
    EngineEnded    -------------------------------------->  its process ended, and why
                   <--------------------------------------  KillEngine
    Leaving        -------------------------------------->  drain this replica: the operator ends `weft join`
                   <--------------------------------------  Dismissal: leave, and why
    SessionLost    -------------------------------------->  nothing is heard of the server
    LinkBeat       <------------------------------------->  every BEAT_S, in both directions

Between them pass the messages of ``weft.rpc.messages``, unread: commands to the engine and its reports.
"""

from __future__ import annotations

from typing import Any

import msgspec

LINK_VERSION = 1
"""Grows when frames or messages change; another version is refused."""
BEAT_S = 0.5
SILENT_S = 3.0
"""A machine from which no frame came for this long has vanished."""


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """``agent`` names a replica of a joined machine for as long as its `weft join` runs. ``attempt`` grows
    with each Hello of an agent, so that a late one is told from a new one. ``host``: the machine's name.
    ``started_by``: what started `weft join`, such as a Ray actor; empty for a person."""

    link_version: int
    weft_version: str
    agent: str
    attempt: int
    host: str
    started_by: str = ""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """``replica``: the number of the agent's replica."""

    epoch: int
    replica: int


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """``config``: fields of an EngineConfig, which the joined machine may override where they are its own
    affair. An agent whose engine runs with the same configuration resets it instead."""

    factory: str
    config: dict[str, Any]
    beat_s: float


class KillEngine(msgspec.Struct, frozen=True, tag=True):
    """End the engine process at once."""


class EngineEnded(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """Drain the replica, and dismiss its agent."""


class SessionLost(msgspec.Struct, frozen=True, tag=True):
    """The agent hears nothing of the server and gives the session up. If only the way back is cut, the server
    learns it from this message, and not from a second silence."""


class Dismissal(msgspec.Struct, frozen=True, tag=True):
    """The session is over. ``refused``: the agent must not come back. ``drained``: it left as it wished.
    Otherwise the server ends, and the agent waits for the next one."""

    reason: str
    refused: bool = False
    drained: bool = False


class LinkBeat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


LinkMessage = (Hello | Welcome | StartEngine | KillEngine | EngineEnded | Leaving | SessionLost | Dismissal
               | LinkBeat)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LinkMessage)


def encode(message: LinkMessage) -> bytes:
    return _encoder.encode(message)


def decode(raw: bytes) -> LinkMessage:
    """Raises msgspec.DecodeError."""
    message: LinkMessage = _decoder.decode(raw)
    return message
