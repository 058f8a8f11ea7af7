"""Bytes to a server and bytes back, below any HTTP client: a hostile one follows no rules."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

ADDRESS = "127.0.0.1"
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])


class RawClient:
    """One connection. ``address`` is the client's own, so that several count as different ones."""

    def __init__(
        self, url: str, *, address: str = ADDRESS, limit_s: float = 10.0, receive_bytes: int | None = None
    ) -> None:
        server = urlsplit(url)
        self.socket = socket.socket()
        self.socket.settimeout(limit_s)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.bind((address, 0))
        self.socket.connect((server.hostname, server.port))
        self._pending = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """False if the server has closed the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def post(self, path: str, body: bytes) -> None:
        head = b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n" % (path.encode(), HEAD, len(body))
        self.send(head + body)

    def answer(self) -> Answer | None:
        """None if the connection ended first."""
        while b"\r\n\r\n" not in self._pending:
            if not self._read():
                return None
        head, self._pending = self._pending.split(b"\r\n\r\n", 1)
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        while len(self._pending) < size:
            if not self._read():
                return None
        body, self._pending = self._pending[:size], self._pending[size:]
        return Answer(int(status_line.split(" ")[1]), headers, body)

    def wait_for_more(self) -> None:
        """For bytes behind the last answer, or for the end. Raises TimeoutError."""
        if not self._pending:
            self._read()

    def is_closed(self, limit_s: float = 5.0) -> bool:
        """Reads until the server closes the connection; False if it does not in time."""
        self.socket.settimeout(limit_s)
        try:
            while self._read():
                self._pending = b""
        except TimeoutError:
            return False
        return True

    def everything(self) -> bytes:
        """Return all bytes until the server closes the connection. Raise TimeoutError."""
        while self._read():
            pass
        return self._pending

    def _read(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            data = self.socket.recv(65536)
            self._pending += data
            return bool(data)
        return False
