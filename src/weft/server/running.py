"""The servers that run on this machine: a file for each, which its process locks as long as it lives.

    ~/.local/state/weft/servers/PID.json    {"pid", "url", "model", "started_s"}

``weft serve`` writes its file once the port is bound. A reader asks the kernel whether each lock is held: a server that
was killed is not listed, and its file is removed. Only their owner can read the files.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from weft.host import state_directory

UNIX = "unix:"
"""Prefix of the path in the URL of a server that listens at a Unix socket, as nginx writes it."""


class RunningProcess(msgspec.Struct, frozen=True):
    """A server that runs. ``model``: as the command named it; None for the embedded model. ``started_s``: since the
    epoch. ``certificate``: the file of a server that speaks TLS."""

    pid: int
    url: str
    model: str | None
    started_s: float
    certificate: str | None = None


def socket_path(url: str) -> str | None:
    """Return the path in the URL of a Unix socket; None for any other URL."""
    if not url.startswith(UNIX):
        return None
    path = url.removeprefix(UNIX)
    return "/" + path.lstrip("/") if path.startswith("//") else path


class Announcement:
    """The entry of this process among the servers; ``close`` removes it. If the directory cannot be written, the server
    is not listed."""

    def __init__(self, url: str, model: str | None, *, certificate: str | None = None) -> None:
        self._file: Path | None = None
        self._fd = -1
        with suppress(OSError):
            running_servers()  # this also removes files of killed servers
            folder = _folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = folder / f"{os.getpid()}.json"
            new = file.with_suffix(
                ".new"
            )  # rename it only when it is locked: else a reader would take the server for dead
            self._fd = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = None if certificate is None else os.path.abspath(certificate)
            os.write(self._fd, msgspec.json.encode(RunningProcess(os.getpid(), url, model, time.time(), path)))
            new.rename(file)
            self._file = file

    def close(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            os.close(self._fd)
            self._file = None


class LockFile:
    """A new file that this process holds a lock on, until ``remove`` or its death. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a live process holds this file. Raise OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two readers do not exclude each other
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def running_servers() -> list[RunningProcess]:
    """Return the running servers, the oldest first."""
    servers = []
    for file in _folder().glob("*.json"):
        with suppress(OSError):
            if not is_locked(file):
                file.unlink()  # its process has ended
                continue
            with suppress(msgspec.DecodeError):  # written by another version
                servers.append(msgspec.json.decode(file.read_bytes(), type=RunningProcess))
    return sorted(servers, key=lambda server: server.started_s)


def _folder() -> Path:
    return state_directory() / "servers"
