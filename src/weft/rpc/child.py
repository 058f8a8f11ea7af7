"""Child processes of the server: a child reads its launch from stdin, and ends when stdin ends.

    parent                                             child: python -m MODULE
    start_child(module, launch)  ---- one frame ---->  read_launch(type)
    (the pipe stays open)        ------- end ------->  die_with_parent: leaves at once

A child has its own session or process group, so signals of the terminal do not reach it: the parent decides about
Ctrl-C. A child never outlives its parent: a thread waits for the end of stdin, which comes however the parent ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

if TYPE_CHECKING:
    import asyncio

_SOCKET_PATH_MAX = 90
_LENGTH_BYTES = 8
LaunchType = TypeVar("LaunchType", bound=msgspec.Struct)


async def start_child(
    module: str,
    launch: msgspec.Struct,
    *arguments: str,
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str],
    own_session: bool = True,
) -> asyncio.subprocess.Process:
    """Start ``python -m module``. ``descriptors``: inherited files; ``environment``: all variables of the child.
    Without ``own_session`` the child stays in this session and calls ``own_group``. Raise OSError."""
    import asyncio  # the children import this module too, and have no loop

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        start_new_session=own_session,
        env=dict(environment),
        pass_fds=tuple(descriptors),
    )
    assert process.stdin is not None
    body = msgspec.msgpack.encode(launch)
    process.stdin.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    return process


def own_group() -> None:
    """Leave the parent's process group: from then on signals of the terminal do not reach this process. It stays in the
    session of the parent, because Linux may give each session the same time (sched_autogroup) regardless of
    priorities."""
    os.setpgid(0, 0)


def read_launch(stream: BinaryIO, launch: type[LaunchType]) -> LaunchType:
    """Read the launch from ``stream``. Raise EOFError if the parent ended before."""
    size = stream.read(_LENGTH_BYTES)
    body = stream.read(int.from_bytes(size, "little"))
    if len(size) < _LENGTH_BYTES or len(body) < int.from_bytes(size, "little"):
        raise EOFError("the parent process ended before it sent the launch")
    return msgspec.msgpack.decode(body, type=launch)


def die_with_parent(descriptor: int, folder: str) -> None:
    """End this process when the other end of the pipe closes, whatever else runs. Remove the folder first, since the
    parent no longer can."""

    def wait() -> None:
        os.read(descriptor, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def private_folder() -> str:
    """Return a new folder for sockets that no other user can reach (mode 0700). The path is short enough for sockets
    (about 100 bytes on most systems)."""
    folder = tempfile.mkdtemp(prefix="weft-")
    if len(folder) > _SOCKET_PATH_MAX:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="weft-", dir="/tmp")
    return folder
