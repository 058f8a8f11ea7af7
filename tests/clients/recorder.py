"""A proxy that writes down what a client sends and what it gets.

    recorder.py URL FILE        prints its own address; one JSON object a line: method, path, body, status, answer

An agent is pointed at it in place of the server. ``fields`` names what bodies have, for a comparison with what the
tests know (``tests/server/agent_bodies.py``).
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_OWN = ("parameters", "input_schema", "input", "arguments", "schema", "metadata", "client_metadata")
"""Fields whose inside is the user's own, or the client's: they mean nothing to a server."""
_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive", "accept-encoding"}


class Recorder:
    """``url``: where clients send. ``exchanges``: all so far."""

    def __init__(self, target: str, file: Path | None = None) -> None:
        self.exchanges: list[dict[str, Any]] = []
        self._file = file
        self._lock = threading.Lock()
        host = urlsplit(target).netloc
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                server = http.client.HTTPConnection(host, timeout=120)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
                server.request(self.command, self.path, body=raw or None, headers=headers)
                if _leaves(self.connection, server.sock):
                    server.close()
                    self.close_connection = True
                    recorder.note(self.command, self.path, raw, 499, {}, b"[left]")
                    return
                answer = server.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                got = bytearray()
                try:
                    while part := answer.read1(65536):
                        got += part
                        self.wfile.write(part)
                        self.wfile.flush()
                except OSError:  # the client left; so does the request
                    got += b"\n[left]"
                finally:
                    server.close()
                self.close_connection = True
                recorder.note(self.command, self.path, raw, answer.status, dict(answer.getheaders()), bytes(got))

            do_GET = do_POST = do_HEAD = do_DELETE = _forward

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def note(self, method: str, path: str, raw: bytes, status: int, headers: dict[str, str], answer: bytes) -> None:
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = None
        exchange = {
            "method": method,
            "path": path.partition("?")[0],
            "body": body,
            "status": status,
            "ignored": next((value for name, value in headers.items() if name.lower() == "x-weft-ignored"), ""),
            "answer": answer.decode(errors="replace"),
        }
        with self._lock:
            self.exchanges.append(exchange)
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(exchange) + "\n")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _leaves(client: socket.socket, server: socket.socket) -> bool:
    """Wait for the answer's first byte; whether the client closed its connection before."""
    ready, _, _ = select.select([client, server], [], [])
    return server not in ready and client.recv(1, socket.MSG_PEEK) == b""


def fields(body: Any, *, depth: int = 3) -> Iterator[str]:
    """Yield the path of each field, with the types of blocks and tools; what tools and their arguments define is the
    user's own."""
    if not isinstance(body, dict):
        return
    for name, value in body.items():
        yield name
        if name in _OWN and (depth < 3 or not isinstance(value, list)):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and depth:
                kind = one.get("type")
                place = f"{name}[{kind}]" if isinstance(kind, str) else name
                yield place
                yield from (f"{place}.{inner}" for inner in fields(one, depth=depth - 1))


if __name__ == "__main__":
    recorder = Recorder(sys.argv[1], Path(sys.argv[2]))
    print(recorder.url, flush=True)
    threading.Event().wait()
