"""The fleet under the soak: one server of three engines and two HTTP processes, and what is done to it.

    kill_engine, kill_worker    kill -9 of one that is not spared, when all are ready
    fill_disk, free_disk        the disk of store and answers, a tmpfs of a few MB, has no byte left
    jump_clock                  the wall clock of all its processes goes forth or back; monotonic ones go on
    restart                     SIGTERM, and a new server on the same store

``why`` says which of these explains that a client was not answered. Each fault that a client may see is a
span of time, and explains a failure of its own kind alone: a killed engine must never be seen.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.soak_million.questions import KEYS

ENGINES = 3
WORKERS = 2
OPERATOR = "soak-operator"
DISK_MB = 72
STORE_MB = 40
START_S = 600.0
_SEEN_LATE_S = 5.0
"""A client may hear of a fault so long behind it, on a busy machine."""
_LOOKS = httpx.Client(timeout=60, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""Each look has a connection of its own: the process behind an old one may have been killed."""
_CLOCK_C = Path(__file__).with_name("clock_offset.c")


@dataclass(slots=True)
class Span:
    kind: str
    began_s: float
    ended_s: float


class Fleet:
    """``folder`` has the server's temporary files, its log and its disk. ``is_bounded``: that disk is a tmpfs
    of its own."""

    def __init__(self, folder: Path, *, is_bounded: bool, dtype: str) -> None:
        self._folder, self.is_bounded, self._dtype = folder, is_bounded, dtype
        self.disk, self.temporary = folder / "disk", folder / "tmp"
        for path in (self.disk, self.temporary):
            path.mkdir(exist_ok=True)
        self._filler = self.disk / "filler"
        self._clock = _clock_file(folder)
        self.starts = 0
        self.counts = Counter[str]()
        self._kills = 0
        """Of engines of the present server."""
        self._spans: list[Span] = []
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._engine = self._worker = 0

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        """Returns when all engines serve. Raises RuntimeError where it does not start."""
        self.starts += 1
        self._kills = 0
        more = [word for key in KEYS for word in ("--api-key", key)]
        # 2 cores and three engines: with a thread each, none waits for the thread of another
        self._process, self.url = serve(
            self._folder / "server.log",
            self.temporary,
            [
                "--dtype",
                self._dtype,
                "--replicas",
                str(ENGINES),
                "--http-workers",
                str(WORKERS),
                "--threads",
                "1",
                "--memory",
                "96MiB",
                "--store",
                str(self.disk / "store"),
                "--store-size",
                f"{STORE_MB}MB",
                "--operator-key",
                OPERATOR,
                "--tenant-by-key",
                *more,
            ],
            responses=str(self.disk / "responses.sqlite"),
            clock=self._clock,
        )
        wait_until(lambda: self.is_whole, "the engines are not ready")
        self._engine, self._worker = self._engines()[1], self._workers()[0]

    def stop(self) -> int:
        began_s = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(120)
        self._spans.append(Span("restart", began_s, time.monotonic()))
        return code

    def end(self) -> None:
        """At once; nothing where it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> int:
        began_s = time.monotonic()
        code = self.stop()
        self.start()
        self._spans.append(Span("restart", began_s, time.monotonic()))
        self.counts["restarts of the server"] += 1
        return code

    # ------------------------------------------------------------------ faults

    def kill_engine(self, pick: int) -> bool:
        """Whether all were ready, so that one could be."""
        if not self.is_whole:
            return False
        engines = [pid for pid in self._engines() if pid != self._engine]
        self._kills += 1
        self._spans.append(Span("kill", time.monotonic(), time.monotonic()))
        os.kill(engines[pick % len(engines)], signal.SIGKILL)
        self.counts["engines killed"] += 1
        return True

    def lose_engine(self) -> None:
        """The control: a death that nobody counts."""
        os.kill(self._engines()[0], signal.SIGKILL)

    def kill_worker(self) -> None:
        for pid in self._workers():
            if pid != self._worker:
                self._spans.append(Span("worker", time.monotonic(), time.monotonic()))
                os.kill(pid, signal.SIGKILL)
                self.counts["HTTP processes killed"] += 1

    def fill_disk(self) -> None:
        if not self.is_bounded:
            return
        self._spans.append(Span("disk", time.monotonic(), float("inf")))
        with self._filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass
        self.counts["full disks"] += 1

    def free_disk(self) -> None:
        if self._filler.exists():
            self._filler.unlink()
            for span in self._spans:
                if span.kind == "disk":
                    span.ended_s = min(span.ended_s, time.monotonic())

    def jump_clock(self, seconds: int) -> None:
        if self._clock is not None:
            with self._clock.open("r+b") as file:  # in place: a page of a file that is cut is a SIGBUS
                file.write(struct.pack("q", seconds))
            self.counts["jumps of the clock"] += 1

    def soak_was_late(self, began_s: float) -> None:
        self._spans.append(Span("late", began_s, time.monotonic()))

    def why(self, failure: str, began_s: float, ended_s: float) -> str:
        """What explains ``failure`` of a request that took this time; "" for nothing."""
        self._spans = [span for span in self._spans if span.ended_s > time.monotonic() - 600]
        beside = Counter(
            span.kind for span in self._spans if span.began_s <= ended_s and began_s <= span.ended_s + _SEEN_LATE_S
        )
        if failure.startswith("connection") and (beside["worker"] or beside["restart"]):
            return "its HTTP process was killed" if beside["worker"] else "the server restarted"
        if failure.startswith("503") and beside["restart"]:
            return "the server restarted"
        if failure.startswith("408") and beside["late"]:
            return "the soak itself did not run for seconds"
        if "request_killed_engines" in failure and beside["kill"] > 1:
            return "two engines were killed under it"
        return ""

    # ------------------------------------------------------------------ looks

    @property
    def is_whole(self) -> bool:
        rows = self.ask("/v1/replicas")["data"]
        return len(rows) == ENGINES and all(row["state"] == "ready" for row in rows) and len(self._workers()) == WORKERS

    def ask(self, path: str) -> dict[str, Any]:
        """A look of the operator."""
        failure = ""
        for attempt in range(20):
            try:
                answer = _LOOKS.get(self.url + path, headers={"Authorization": f"Bearer {OPERATOR}"})
                if answer.status_code == 200:
                    found: dict[str, Any] = answer.json()
                    return found
                failure = f"{answer.status_code} {answer.text}"
            except httpx.TransportError as error:
                failure = repr(error)
            time.sleep(0.1 * attempt)
        raise RuntimeError(f"{path} does not answer: {failure}")

    def watched(self) -> dict[str, int]:
        return {
            "supervisor": self._process.pid,
            "HTTP process": self._worker,
            "engine": self._engine,
            "soak": os.getpid(),
        }

    @property
    def fillers(self) -> tuple[Path, ...]:
        return (self._filler,)

    def faults(self) -> list[str]:
        """Of a server without requests: what its audits and counts say. Engines audit themselves when they
        have nothing to do, and die of what they find."""
        found = []
        if self._process.poll() is not None:
            return [f"the server ended with {self._process.returncode}"]
        for pid in (self._engine, self._worker):
            if not psutil.pid_exists(pid):
                found.append(f"process {pid} died, and nobody killed it")
        rows = self.ask("/v1/replicas")["data"]
        deaths = sum(row["restarts"] for row in rows)
        if deaths != self._kills:
            found.append(f"{deaths} engines died and {self._kills} were killed: {[row['reason'] for row in rows]}")
        load = self.ask("/load")
        if any(load.values()):
            found.append(f"without a request the load is {load}")
        engines = self.ask("/v1/cache")["replicas"]
        if len(engines) < len(rows):
            found.append(f"{len(engines)} of {len(rows)} engines answer")
        for one in engines:
            held = {use: one["memory_bytes"][use] for use in ("running_kv", "running_states", "shared_kv")}
            if any(held.values()):
                found.append(f"engine {one['replica']} has no request and holds {held}")
        return found

    def damaged_store(self) -> str:
        """Of a server that has ended: what `weft store verify` finds; "" for nothing. Rows behind one that
        a full disk kept out of the ledger are no damage: the store never hands them out. The next start gives
        their blocks to later records, so they overlap these; the later ones are the right ones."""
        done = subprocess.run(
            [sys.executable, "-m", "weft", "store", "verify", str(self.disk / "store"), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.stdout.startswith("{"):
            return done.stdout + done.stderr
        found = json.loads(done.stdout)
        is_whole = not found["damaged"] and set(found["dropped_rows"]) <= {"orphan", "overlap"}
        return "" if is_whole else done.stdout

    def _engines(self) -> list[int]:
        return self._children("weft.rpc.engine_process")

    def _workers(self) -> list[int]:
        return self._children("weft.server.workers.process")

    def _children(self, module: str) -> list[int]:
        """The oldest first."""
        found = []
        for child in psutil.Process(self._process.pid).children():
            try:
                if module in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append((child.create_time(), child.pid))
            except psutil.NoSuchProcess:
                continue
        return [pid for _, pid in sorted(found)]


def serve(
    log: Path, temporary: Path, more: list[str], *, responses: str, clock: Path | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """A server on a port of its own, and its address. Raises RuntimeError where it does not start."""
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "WEFT_RESTARTS": "1000000",
        "OMP_NUM_THREADS": "1",
        "WEFT_STORE_RESERVE": "0",
        "WEFT_RESPONSE_STORE_SIZE": "4MB",
        "WEFT_RESPONSE_STORE": responses,
        "WEFT_FILE_STORE": "off",
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # engines are started by the hundred
    if clock is not None:
        environment |= {"LD_PRELOAD": str(clock.with_suffix(".so")), "SOAK_CLOCK": str(clock)}
    begin = log.stat().st_size if log.exists() else 0
    with log.open("ab") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", "serve", "--port", "0", "--log-level", "warning", *more],
            env=environment,
            stdout=lines,
            stderr=subprocess.STDOUT,
        )

    def address() -> str:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at its start:\n{log.read_bytes()[begin:].decode()}")
        said = log.read_bytes()[begin:].decode().split("listening on ", 1)
        return said[1].split(";")[0].split()[0] if len(said) > 1 else ""

    wait_until(address, "the server does not say its address")
    url = address()
    wait_until(lambda: is_healthy(url) or not address(), "the server is not healthy")
    return process, url


def is_healthy(url: str) -> bool:
    try:
        return bool(_LOOKS.get(f"{url}/health").json()["status"] == "ok")
    except (httpx.HTTPError, KeyError, ValueError):
        return False


def wait_until(holds: Any, otherwise: str) -> None:
    end_s = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > end_s:
            raise RuntimeError(otherwise)
        time.sleep(0.2)


def _clock_file(folder: Path) -> Path | None:
    """The offset of the servers' clock, the library that adds it beside it; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    file = folder / "clock"
    file.write_bytes(struct.pack("q", 0))
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(file.with_suffix(".so")), str(_CLOCK_C), "-ldl"], check=True
    )
    return file
