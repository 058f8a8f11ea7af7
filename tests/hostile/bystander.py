"""A second client beside an attack, and the memory of a process before and after it.

    with bystander(server) as other:      the undisturbed median is known, requests are sent
        attack()
    other.check()                         no failure, no request slower than 250 ms

The bystander is a process of its own, so that an attack written in Python does not hold its interpreter
lock. It comes from 127.0.0.2, so limits per address do not meet it. Every request opens a connection: a
server that no longer accepts is as bad as one that no longer answers.

Other work on the machine also delays the bystander, and three things allow for it. A latency is without the
time for which the server and its child processes were ready to run and had no core
(``/proc/PID/schedstat``), but for 250 ms at most: an attack that makes the server's own processes compete
is not excused. A second thread sleeps 5 ms again and again; its worst delay, ``stall_ms``, is added to the
limit. Where the undisturbed median is above 5 ms (an idle machine has 3), the limit grows in proportion."""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:  # the child imports none of it
    from tests.server.running import RunningServer

LIMIT_MS = 250.0
_IDLE_MS = 5.0
SMALL_BODY = {"prompt": "say:ok", "max_tokens": 4}
_ADDRESS = "127.0.0.2"
_UNDISTURBED_REQUESTS = 20
_PAUSE_S = 0.02
_TICK_S = 0.005
_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Bystander:
    """Complete after the ``with`` block; ``undisturbed_ms`` is known inside it."""

    undisturbed_ms: float
    latencies_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stall_ms: float = 0.0

    @property
    def slowest_ms(self) -> float:
        return max(self.latencies_ms, default=0.0)

    def check(self, limit_ms: float = LIMIT_MS) -> None:
        print(self)  # pytest shows it beside a failure
        assert not self.failures, self.failures[:3]
        limit_ms *= max(1.0, self.undisturbed_ms / _IDLE_MS)
        assert self.slowest_ms <= limit_ms + self.stall_ms, str(self)

    def __str__(self) -> str:
        return (
            f"bystander: {len(self.latencies_ms)} requests, slowest {self.slowest_ms:.0f} ms, "
            f"undisturbed median {self.undisturbed_ms:.1f} ms, machine stalled {self.stall_ms:.0f} ms"
        )


@contextlib.contextmanager
def bystander(
    server: RunningServer,
    *,
    path: str = "/v1/completions",
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[Bystander]:
    """Sends one small request after another to ``server`` while the block runs."""
    arguments = json.dumps(
        {
            "url": server.url,
            "pid": server.process.pid,
            "path": path,
            "body": SMALL_BODY if body is None else body,
            "headers": dict(headers or {}),
        }
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.bystander", arguments],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        other = Bystander(undisturbed_ms=json.loads(child.stdout.readline()))
        assert child.stdout.readline() == "sending\n"
        yield other
        rest, _ = child.communicate("", timeout=30)
        report = json.loads(rest)
        other.latencies_ms, other.failures = report["latencies_ms"], report["failures"]
        other.stall_ms = report["stall_ms"]
    finally:
        child.kill()
        child.wait()


def rss_of(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0  # it has ended


def rss_returns(pid: int, before: int, *, share: float = 0.1, limit_s: float = 10.0) -> bool:
    """Whether the process is back within ``share`` of ``before`` in time."""
    end_s = time.monotonic() + limit_s
    while rss_of(pid) > before * (1 + share):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    assert rss_of(pid), f"process {pid} has ended"  # a dead process holds no memory, and proves nothing
    return True


# ---------------------------------------------------------------------- in the child


def _small_request(host: str, port: int, path: str, body: bytes, headers: Mapping[str, str]) -> str | None:
    """What was wrong with the answer, None if it was right."""
    connection = http.client.HTTPConnection(host, port, timeout=20, source_address=(_ADDRESS, 0))
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read()
        return None if response.status == 200 else f"{response.status} {text[:200]!r}"
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()


def _without_core_ms(pid: int) -> float:
    """For how long the main threads of ``pid`` and of its children waited for a core, since they began."""
    waited_ns = 0
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *children):
            with contextlib.suppress(OSError):  # it has ended, or this kernel does not count
                waited_ns += int(Path(f"/proc/{one}/schedstat").read_text().split()[1])
    return waited_ns / 1e6


def _main() -> None:
    asked = json.loads(sys.argv[1])
    address = urlsplit(asked["url"])
    over = threading.Event()
    worst_tick_s = 0.0

    def tick() -> None:
        nonlocal worst_tick_s
        while not over.is_set():
            began_s = time.monotonic()
            time.sleep(_TICK_S)
            worst_tick_s = max(worst_tick_s, time.monotonic() - began_s - _TICK_S)

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    def send() -> tuple[float, float, str | None]:
        """Milliseconds, those without a core among them, and what was wrong."""
        before_ms, began_s = _without_core_ms(asked["pid"]), time.monotonic()
        wrong = _small_request(
            address.hostname or "",
            address.port or 80,
            asked["path"],
            json.dumps(asked["body"]).encode(),
            asked["headers"],
        )
        latency_ms = (time.monotonic() - began_s) * 1000
        # Never below zero: a child that ended takes its count along.
        waited_ms = max(_without_core_ms(asked["pid"]) - before_ms, 0.0)
        return latency_ms, min(waited_ms, latency_ms, LIMIT_MS), wrong

    print(statistics.median(send()[0] for _ in range(_UNDISTURBED_REQUESTS)), flush=True)
    threading.Thread(target=wait_for_the_end, daemon=True).start()
    threading.Thread(target=tick, daemon=True).start()
    latencies_ms, failures = [], []
    while not latencies_ms or not over.wait(_PAUSE_S):
        latency_ms, waited_ms, wrong = send()
        if not latencies_ms:  # an attack of milliseconds begins beside a client that sends already
            print("sending", flush=True)
        latencies_ms.append(latency_ms - waited_ms)
        if wrong is not None:
            failures.append(wrong)
    print(json.dumps({"latencies_ms": latencies_ms, "failures": failures, "stall_ms": worst_tick_s * 1000}))


if __name__ == "__main__":
    _main()
