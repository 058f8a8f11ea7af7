"""A TCP proxy between a joined machine and its server, whose ways can be cut one by one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class CutNetwork:
    """``port`` leads to ``target``. While a way is cut, its bytes are held back and nothing is closed, as
    by a switch that fails."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = {"there": threading.Event(), "back": threading.Event()}
        for way in self._open.values():
            way.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *ways: str) -> None:
        """``there``: from the machine to the server. ``back``: from the server to the machine."""
        for way in ways:
            self._open[way].clear()

    def heal(self) -> None:
        for way in self._open.values():
            way.set()

    def reset(self) -> None:
        """Every connection is closed."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.heal()
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for source, sink, way in ((client, server, "there"), (server, client, "back")):
                    threading.Thread(target=self._copy, args=(source, sink, self._open[way]), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, way: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                way.wait()
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cut_network(target: int) -> Iterator[CutNetwork]:
    network = CutNetwork(target)
    try:
        yield network
    finally:
        network.close()
