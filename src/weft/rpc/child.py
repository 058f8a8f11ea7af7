"""A child process of the server: its launch comes on its stdin, and the end of stdin is the end of the child.

    parent                                             child: python -m MODULE
    start_child(module, launch)  ---- one frame ---->  read_launch(type)
    (the pipe stays open)        ------- end ------->  die_with_parent: leaves at once

A child has a session or a process group of its own, so signals of the terminal do not reach it: the parent
decides about Ctrl-C. It never outlives its parent: a thread waits for the end of stdin, which the kernel
delivers however the parent ended.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO, TypeVar

import msgspec

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
    """Start ``python -m module``. ``descriptors``: of files that it inherits; ``environment``: all of its variables.
    Without ``own_session`` it stays in this one's session, and calls ``own_group``. Raise OSError."""
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
    """Leave the parent's process group: signals of the terminal do not reach this process from now on. It stays in the
    session of its parent: Linux may give each session the same time (sched_autogroup), whatever the priorities
    inside."""
    os.setpgid(0, 0)


def read_launch(stream: BinaryIO, launch: type[LaunchType]) -> LaunchType:
    """Read the launch from ``stream``. Raise EOFError when the parent ended before."""
    size = stream.read(_LENGTH_BYTES)
    body = stream.read(int.from_bytes(size, "little"))
    if len(size) < _LENGTH_BYTES or len(body) < int.from_bytes(size, "little"):
        raise EOFError("the parent process ended before it sent the launch")
    return msgspec.msgpack.decode(body, type=launch)


def die_with_parent(descriptor: int, folder: str) -> None:
    """End this process when the other end of the pipe closes, whatever else runs. It removes the folder first, since
    the parent no longer can."""

    def wait() -> None:
        os.read(descriptor, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def private_folder() -> str:
    """Return a new folder for sockets that no other user can reach (mode 0700). Short enough for a socket's path (about
    100 bytes in most systems)."""
    folder = tempfile.mkdtemp(prefix="weft-")
    if len(folder) > _SOCKET_PATH_MAX:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="weft-", dir="/tmp")
    return folder
