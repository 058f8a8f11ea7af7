"""A hub on loopback: the part of its HTTP API that a pull uses, over files that a test writes.

    GET  /api/models/OWNER/NAME[/revision/R]   commit, files, sizes, sha256 or git's digest
    GET  /api/models/OWNER/NAME/tree/COMMIT    its files
    GET  /OWNER/NAME/resolve/COMMIT/FILE       the bytes of a small file; a large one is elsewhere: 302
    GET  /cdn/...                              its bytes, from a Range on

Like the hub it sends large files from another address. ``cuts``: for each entry, one connection ends after this number
of bytes of a file. ``wrong``: files that are sent with other bytes, and how often.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = (".safetensors", ".gguf")


class Hub:
    def __init__(self, files: dict[str, Path]) -> None:
        """``files``: directories by ``owner/name``."""
        self.files = files
        self.commit = COMMIT
        self.cuts: dict[str, list[int]] = {}
        self.wrong: dict[str, int] = {}
        self.held: dict[str, threading.Event] = {}
        self.names: dict[str, str] = {}
        """Under which a file is listed, if not its own."""
        self.ranges: list[tuple[str, int]] = []
        """(file, where its bytes began) of each download."""
        self.endpoint = ""

    def listing(self, repository: str) -> dict[str, Any]:
        root = self.files[repository]
        siblings = []
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            name, data = str(path.relative_to(root)), path.read_bytes()
            entry: dict[str, Any] = {
                "rfilename": self.names.get(name, name),
                "size": len(data),
                "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if name.endswith(_LARGE):
                entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
            siblings.append(entry)
        return {
            "id": repository,
            "modelId": repository,
            "sha": self.commit,
            "siblings": siblings,
            "private": False,
            "gated": False,
            "downloads": 0,
            "tags": [],
        }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
            if match[1] not in self.hub.files:
                return self._answer(404, b'{"error":"Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            if match[2] not in (None, "main", "v1", self.hub.commit):
                return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self._answer(200, json.dumps(self.hub.listing(match[1])).encode(), {})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.+", path):
            return self._answer(
                200,
                json.dumps(
                    [
                        {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
                        for one in self.hub.listing(match[1])["siblings"]
                    ]
                ).encode(),
                {},
            )
        if match := re.fullmatch(r"/(cdn/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if not match[1] and match[4].endswith(_LARGE):
                return self._answer(302, b"", {"Location": f"{self.hub.endpoint}/cdn{path}"})
            return self._file(self.hub.files[match[2]] / match[4], match[4])
        return self._answer(404, b"", {})

    def do_HEAD(self) -> None:
        """Answer the request for a small file's size and digest, which the client sends before it fetches the file."""
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path.partition("?")[0])
        file = self.hub.files[match[1]] / match[3] if match else Path("none")
        if not file.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._answer(
            200,
            b"",
            {
                "ETag": f'"{hashlib.sha1(file.read_bytes()).hexdigest()}"',
                "X-Repo-Commit": self.hub.commit,
                "Content-Length": str(file.stat().st_size),
            },
        )

    def _file(self, path: Path, name: str) -> None:
        data = path.read_bytes()
        if self.hub.wrong.get(name, 0) > 0:
            self.hub.wrong[name] -= 1
            data = bytes(len(data) - 1) + b"\x01"
        begin = int(re.sub(r"\D", "", self.headers.get("Range", "0")) or 0)
        self.hub.ranges.append((name, begin))
        whole, data = len(data), data[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data)))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{whole - 1}/{whole}")
        self.end_headers()
        cuts = self.hub.cuts.get(name, [])
        cut = cuts.pop(0) if cuts else None
        self.wfile.write(data if cut is None else data[:cut])
        self.wfile.flush()
        if (held := self.hub.held.get(name)) is not None:
            held.wait(60)
        self.close_connection = cut is not None

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def hub_server(files: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for held in hub.held.values():
            held.set()
        server.shutdown()
        server.server_close()
