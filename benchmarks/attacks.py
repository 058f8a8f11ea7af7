"""What attacks of one client cost another: the figures of docs/security.md.

    python -m benchmarks.attacks                 all, each with a server of its own: minutes
    python -m benchmarks.attacks unknown keys    those with a word in their name

    server (embedded model, 1 thread)  <-- attacker: bodies, grammars, streams
                                       <-- bystander: one small request; what it waits is the figure

Clients are threads of this process. A figure is the bystander's wait in seconds, or the peak memory of the server's
HTTP process (VmHWM). ``alone``: the same request of the bystander without the attack.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

KEYS = {"attacker": "a" * 32, "bystander": "b" * 32}
START_S = 120.0
_URL = re.compile(r"at (http://\S+)")


@dataclass
class Server:
    """``weft serve`` with ``flags`` as a process; ``variables`` are added to its environment."""

    flags: tuple[str, ...] = ()
    keyed: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    descriptors: int = 0
    url: str = ""

    def __enter__(self) -> Server:
        keys = [flag for key in KEYS.values() for flag in ("--api-key", key)] if self.keyed else []
        tenants = ["--operator-key", "o" * 32, "--tenant-by-key"] if self.keyed else []
        off = {"WEFT_RESPONSE_STORE": "off", "WEFT_NAME_STORE": "off", "WEFT_FILE_STORE": "off"}
        command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--threads", "1", "--memory", "64MiB"]
        self._process = subprocess.Popen(
            [*command, *keys, *tenants, *self.flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **off, **self.variables},
            preexec_fn=self._limited if self.descriptors else None,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        end_s = time.monotonic() + START_S
        while "Ctrl-C finishes" not in (said := "".join(self.lines)):
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the server did not start:\n{said}")
            time.sleep(0.05)
        found = _URL.search(said)
        assert found is not None
        self.url = found[1].rstrip(";,")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _limited(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.descriptors, self.descriptors))

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(iter(self._process.stdout.readline, ""))

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(self, who: str = "attacker") -> httpx.Client:
        headers = {"authorization": f"Bearer {KEYS[who]}"} if self.keyed else {}
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=self.url, headers=headers, timeout=180, limits=limits)

    def post(self, path: str, body: Any, who: str = "attacker") -> httpx.Response:
        with self.client(who) as client:
            content = body if isinstance(body, bytes) else json.dumps(body)
            return client.post(path, content=content, headers={"content-type": "application/json"})

    def peak_mib(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) // 1024

    def waits(self, path: str = "/v1/completions", body: Any = None, who: str = "bystander") -> str:
        """Return what one request of the bystander took, or its status."""
        began_s = time.monotonic()
        asked = {"prompt": "hi", "max_tokens": 1} if body is None else body
        answer = self.get(path) if asked == "GET" else self.post(path, asked, who)
        took_s = time.monotonic() - began_s
        return f"{took_s:.2f} s" if answer.status_code == 200 else f"{answer.status_code} after {took_s:.2f} s"

    def get(self, path: str) -> httpx.Response:
        with self.client("bystander") as client:
            return client.get(path)


@contextlib.contextmanager
def beside(*attacks: Callable[[], Any], for_s: float) -> Iterator[None]:
    """Run ``attacks`` in threads; the block begins ``for_s`` later."""

    def run(attack: Callable[[], Any]) -> None:
        with contextlib.suppress(httpx.HTTPError, OSError):
            attack()

    for attack in attacks:
        threading.Thread(target=run, args=(attack,), daemon=True).start()
    time.sleep(for_s)
    yield


def stream(server: Server, body: dict[str, Any], seconds: float = 120.0) -> None:
    end_s = time.monotonic() + seconds
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        for _ in answer.iter_raw():
            if time.monotonic() > end_s:
                return


def unknown_fields() -> dict[str, str]:
    draw = random.Random(1)
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    while len(body) < 45_000:
        body["".join(draw.sample("presence_penalty", 16))] = 0
    raw = json.dumps(body).encode()
    with Server() as server:
        alone = server.waits("/health", "GET")
        with beside(lambda: server.post("/v1/completions", raw), for_s=0.05):
            return {"alone": alone, "/health": server.waits("/health", "GET")}


def ambiguous_grammar() -> dict[str, str]:
    body = {
        "prompt": "a",
        "max_tokens": 3000,
        "stream": True,
        "logit_bias": {"67": 100},
        "guided_grammar": 'start: s\ns: s s | "a" | ',
    }
    with Server() as server:
        alone = server.waits()
        with beside(lambda: stream(server, body), for_s=50.0):
            return {"alone": alone, "another request": server.waits(body={"prompt": "hi", "max_tokens": 2})}


def bytes_before_the_token() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp()
    with Server(("--listen-engines", f"127.0.0.1:{port}", "--token", f"{folder}/token")) as server:
        before = server.peak_mib()

        def attack() -> None:
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
                one.recv(64)
                one.sendall(b"\x06" + ((1 << 30) - 1).to_bytes(8, "big"))
                for _ in range(600):
                    one.sendall(bytes(1 << 20))

        with beside(attack, attack, for_s=3.0):
            return {"before": f"{before} MiB", "peak": f"{server.peak_mib()} MiB"}


def text_without_spaces() -> dict[str, str]:
    with Server() as server:
        server.post("/tokenize", {"prompt": "a" * 9000})
        before = server.peak_mib()
        body = {"messages": [{"role": "user", "content": "a" * 31_900_000}]}
        began_s = time.monotonic()
        status = server.post("/tokenize", body).status_code
        took_s = time.monotonic() - began_s
        return {"before": f"{before} MiB", "peak": f"{server.peak_mib()} MiB", "answer": f"{status} in {took_s:.1f} s"}


def spaces() -> dict[str, str]:
    with Server() as server:
        return {"answer": str(server.post("/tokenize", {"prompt": " " * 12_000_000}).status_code)}


def streams_of_one_key() -> dict[str, str]:
    body = {"prompt": "a", "n": 16, "priority": -(2**31), "max_tokens": 3900, "stream": True, "ignore_eos": True}
    gaps: list[float] = []
    with Server(keyed=True) as server:

        def listen() -> None:
            own = {"prompt": "b", "max_tokens": 3000, "stream": True, "ignore_eos": True}
            while True:  # a fast machine is at the end of an answer before the attack is
                with server.client("bystander") as client, client.stream("POST", "/v1/completions", json=own) as answer:
                    last_s = time.monotonic()
                    for _ in answer.iter_raw():
                        gaps.append(time.monotonic() - last_s)
                        last_s = time.monotonic()

        alone = server.waits()
        with beside(listen, for_s=2.0):
            quiet = max(gaps[5:], default=0.0)
            gaps.clear()
            with beside(*[lambda: stream(server, body)] * 4, for_s=8.0):
                waits = sorted(server.waits() for _ in range(5))
        return {
            "alone": alone,
            "new request, median": waits[2],
            "longest gap alone": f"{quiet:.2f} s",
            "longest gap": f"{max(gaps):.2f} s",
        }


def slow_readers() -> dict[str, str]:
    body = {"prompt": "a", "n": 16, "max_tokens": 3900, "stream": True, "ignore_eos": True, "logprobs": 20}

    def read(server: Server) -> None:
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for _ in answer.iter_raw(2000):
                time.sleep(0.1)

    def peak(limit_mb: int) -> str:
        with Server(variables={"WEFT_MAX_UNREAD_MB": str(limit_mb)}) as server:
            server.post("/v1/completions", {**body, "stream": False, "max_tokens": 1})
            before = server.peak_mib()
            with beside(*[lambda: read(server)] * 4, for_s=60.0):
                return f"{server.peak_mib() - before} MiB more"

    return {"limit 1 TB": peak(1_000_000), "limit 100 MB": peak(100)}


def queue_of_one_key() -> dict[str, str]:
    body = {"prompt": "a", "n": 64, "max_tokens": 3900, "stream": True, "ignore_eos": True}
    with Server(keyed=True) as server, beside(*[lambda: stream(server, body)] * 20, for_s=5.0):
        return {"another key": server.waits()}


def uploaded(server: Server, who: str, content: bytes, purpose: str = "batch") -> httpx.Response:
    with server.client(who) as client:
        return client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": purpose})


def files_of_one_key() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, Server(keyed=True, variables={"WEFT_FILE_STORE": folder}) as server:
        count = 0
        while count < 1100 and uploaded(server, "attacker", b"a").status_code == 200:
            count += 1
        status = uploaded(server, "bystander", b"a").status_code
        return {"files of the attacker": str(count), "another key": str(status)}


def batch_of_one_key() -> dict[str, str]:
    def line(number: int, tokens: int) -> bytes:
        body = {"model": "default", "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
        asked = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(asked).encode() + b"\n"

    def begun(server: Server, who: str, content: bytes) -> str:
        file = uploaded(server, who, content).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(server.post("/v1/batches", body, who).json()["id"])

    with tempfile.TemporaryDirectory() as folder, Server(keyed=True, variables={"WEFT_FILE_STORE": folder}) as server:
        begun(server, "attacker", b"".join(line(number, 2000) for number in range(3000)))
        time.sleep(2)
        began_s = time.monotonic()
        own = begun(server, "bystander", line(0, 5))
        state = ""
        while state != "completed" and time.monotonic() < began_s + 60:
            state = server.get(f"/v1/batches/{own}").json()["status"]
            time.sleep(0.2)
        return {"another key's batch": f"{state} after {time.monotonic() - began_s:.1f} s"}


def templates_of_one_key() -> dict[str, str]:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": f"f{at}", "description": "d" * 400, "parameters": {"type": "object"}}}
        for at in range(400)
    ]
    for tool in tools[::50]:
        tool["cache_control"] = {"type": "ephemeral"}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 1}
    own = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    with Server(keyed=True) as server:
        alone = server.waits("/v1/chat/completions", own)
        with beside(*[lambda: server.post("/v1/chat/completions", body)] * 60, for_s=1.0):
            return {"alone": alone, "another key": server.waits("/v1/chat/completions", own)}


def no_descriptors() -> dict[str, str]:
    with Server(descriptors=64) as server:
        port = int(server.url.rsplit(":", 1)[1])
        held = []
        for _ in range(60):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=2))
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        engine = next(
            int(child) for child in children if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes()
        )
        os.kill(engine, signal.SIGKILL)
        time.sleep(20)
        for one in held:
            one.close()
        time.sleep(1)
        alive = server._process.poll() is None
        return {"server": "serves" if alive and server.waits().endswith(" s") else "has ended"}


ATTACKS: dict[str, Callable[[], dict[str, str]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        unknown_fields,
        ambiguous_grammar,
        bytes_before_the_token,
        text_without_spaces,
        spaces,
        streams_of_one_key,
        slow_readers,
        queue_of_one_key,
        files_of_one_key,
        batch_of_one_key,
        templates_of_one_key,
        no_descriptors,
    )
}


def main() -> None:
    words = sys.argv[1:]
    for name, attack in ATTACKS.items():
        if not words or any(word in name for word in words):
            began_s = time.monotonic()
            try:
                figures = attack()
            except (RuntimeError, httpx.HTTPError) as error:
                figures = {"failed": f"{type(error).__name__}: {error}"}
            said = ", ".join(f"{key} {value}" for key, value in figures.items())
            print(f"{name}: {said}  [{time.monotonic() - began_s:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
