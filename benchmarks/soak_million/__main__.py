"""10^6 requests through a fleet of three engines, with every fault at once, for as long as it takes.

    python -m benchmarks.soak_million --state /var/tmp/soak --requests 1000000 --rate 200 --hours 8

Requests of all kinds (``questions``) go to a server of three engines and two HTTP processes with a store,
tenants, speculation and grammars (``server``). Meanwhile engines and HTTP processes are killed, the disk is
full, the clock jumps, clients leave, the server restarts. A request without its answer must have a fault that
explains it, and is asked again. Every answer is compared with the first one to its question, and one question
in ``--sample`` with a lone engine: no cache, no store, no speculation, no neighbour.

Every two thousand requests the soak lets all answers end, asks for the audits and counts, and writes its
state down. The same command goes on there. SIGTERM or SIGINT ends it at the next audit, as --hours does. At
the end come the slopes (``slopes``). The exit code is 1 for a wrong answer, an error that no fault explains,
an audit that failed, or a slope above its limit.

Behind the last request ``--controls`` breaks one thing for each check: a token, a request, an engine that
nobody counts, and leaks of the soak itself. A check that does not notice is an error too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import platform
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.soak_million.client import Connection, ConnectionFailed
from benchmarks.soak_million.cpu import CpuTimes
from benchmarks.soak_million.questions import Asking, Said, Stream, StreamFailed, asking, begins, said_whole
from benchmarks.soak_million.server import DISK_MB, Fleet, serve
from benchmarks.soak_million.slopes import PER, Sample, of_folder, of_process, slopes

CONTROL_AT = 30
"""The first request that the controls break."""
CONTROL_REQUESTS = 100
LEAKS = {"soak: descriptors", "soak: memory", "soak: threads", "server's temporary: files"}
TRIES = 20
LOOK_S, LATE_S = 0.2, 2.0
CLOCK_JUMPS_S = (7200, -7200, 86_400, 0, -86_400, 3 * 365 * 86_400, 0)
EVERY = {"engine": 1500, "worker": 2500, "disk": 5000, "clock": 1000, "server": 200_000, "audit": 2000, "sample": 200}
"""Requests between two faults of a kind, two audits, two looks at memory. A disk stays full for a tenth of
that. The start of an engine costs as much as two hundred requests: more kills would be a test of starts."""
_NAMESPACE = "SOAK_DISK"
_M_MMAP_THRESHOLD = -3


class Answers:
    """The first answer to each question, on disk. ``is_lone``: a lone engine gave it."""

    def __init__(self, file: Path) -> None:
        self._base = sqlite3.connect(file, isolation_level=None)
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute("PRAGMA synchronous=OFF")
        self._base.execute("CREATE TABLE IF NOT EXISTS answers (question INTEGER PRIMARY KEY, said TEXT, lone INT)")

    def of(self, question: int) -> Said | None:
        row = self._base.execute("SELECT said FROM answers WHERE question = ?", (question,)).fetchone()
        return None if row is None else json.loads(row[0])

    def add(self, question: int, said: Said, *, is_lone: bool) -> None:
        self._base.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (question, json.dumps(said), is_lone))

    def count(self) -> tuple[int, int]:
        return tuple(self._base.execute("SELECT count(*), coalesce(sum(lone), 0) FROM answers").fetchone())


class Soak:
    """``state``: what is on disk between two runs: counts, samples, answers."""

    def __init__(self, args: argparse.Namespace, fleet: Fleet) -> None:
        self._args, self._fleet, self._folder = args, fleet, args.state
        self.answers = Answers(self._folder / "answers.sqlite")
        self.counts, self.unexplained, self.wrong, self.audits = Counter[str](), [], [], []
        self.samples: list[Sample] = []
        self.cpu = CpuTimes()
        self.next, self.seconds, self.servers = 0, 0.0, 0
        self.is_ending = False
        self._clients: list[Connection] = []
        self._read()
        self.lone_url, self.lone_pid = "", 0
        self.is_control = False
        self._lone_lock = asyncio.Lock()
        self._held: list[Any] = []
        """What a control leaks."""

    # ------------------------------------------------------------------ the run

    async def run(self) -> None:
        began_s, before_s = time.monotonic(), self.seconds
        self._look_at_times(of_starts=True)
        end_s = began_s + self._args.hours * 3600
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.end)
        late = asyncio.create_task(self._note_lateness())
        self._clients = [Connection(self._fleet.url) for _ in range(self._args.concurrency)]
        while self.next < self._args.requests and time.monotonic() < end_s and not self.is_ending:
            last = min(self._args.requests, self.next + self._args.every["audit"])
            await self._spell(self.next, last)
            self.next = last
            self.seconds = before_s + time.monotonic() - began_s
            await asyncio.to_thread(self._quiet)
            if last % self._args.every["server"] == 0 and last < self._args.requests:
                await asyncio.to_thread(self._restart)
                for client in self._clients:
                    client.url = self._fleet.url
        for client in self._clients:
            client.close()
        late.cancel()
        self._say()

    def end(self) -> None:
        """At the next audit."""
        self.is_ending = True

    async def _note_lateness(self) -> None:
        """A client that the machine does not let run is a slow one, and servers end slow ones."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - before_s > LATE_S:
                self._fleet.soak_was_late(before_s)

    async def _spell(self, first: int, last: int) -> None:
        numbers = iter(range(first, last))
        pace = Pace(self._args.rate)

        async def ask(client: Connection) -> None:
            for number in numbers:
                await pace.turn()
                await self._faults(number)
                await self._one(client, asking(self._args.seed, number))

        await asyncio.gather(*(ask(client) for client in self._clients))
        self._fleet.free_disk()

    async def _faults(self, number: int) -> None:
        every, fleet = self._args.every, self._fleet
        rng = random.Random(number)
        if number % every["engine"] == every["engine"] // 2:
            await asyncio.to_thread(fleet.kill_engine, rng.randrange(8))
        if number % every["worker"] == every["worker"] // 3:
            await asyncio.to_thread(fleet.kill_worker)
        if number % every["disk"] == every["disk"] // 4:
            await asyncio.to_thread(fleet.fill_disk)
        if number % every["disk"] == every["disk"] // 4 + every["disk"] // 10:
            fleet.free_disk()
        if number % every["clock"] == 0:
            fleet.jump_clock(CLOCK_JUMPS_S[number // every["clock"] % len(CLOCK_JUMPS_S)])
        if number % every["sample"] == 0:
            await asyncio.to_thread(self._take_sample, number)
        self._control(number)

    # ------------------------------------------------------------------ one request

    async def _one(self, client: Connection, asked: Asking) -> None:
        self.counts["requests"] += 1
        self.counts[f"kind {asked.question.kind}"] += 1
        for _ in range(TRIES):
            began_s = time.monotonic()
            failure, said, has_left = await self._ask(client, asked)
            if not failure:
                await self._judge(asked, said, has_left)
                return
            ended_s = time.monotonic()
            await asyncio.sleep(0.5)  # first: a loop that stood still notes it in the turn that brought this
            why = self._fleet.why(failure, began_s, ended_s)
            if not why:
                self.unexplained.append(f"request {asked.number} ({asked.question.kind}): {failure[:400]}")
                return
            self.counts[f"explained: {why}"] += 1
        self.unexplained.append(f"request {asked.number}: no answer after {TRIES} tries, each with its fault")

    async def _ask(self, connection: Connection, asked: Asking) -> tuple[str, Said, bool]:
        """How it failed ("" if it did not), what was answered, whether its client left."""
        question = asked.question
        body = question.body_bytes(is_stream=asked.is_stream)
        if self.is_control and asked.number == CONTROL_AT + 1:
            body = b'{"model": "nobody"}'
        stream = Stream(question.path)
        try:
            async with connection.post(question.path, body, question.key) as answer:
                if question.is_wrong and answer.status == 400:
                    await answer.read()
                    return "", [["400", "", []]], False
                if answer.status != 200 or question.is_wrong:
                    return f"{answer.status} {(await answer.read()).decode()}", [], False
                if not asked.is_stream:
                    return "", said_whole(question.path, msgspec.json.decode(await answer.read())), False
                while lines := await answer.lines():
                    for line in lines:
                        stream.line(line)
                        if asked.leaves_after is not None and stream.pieces >= asked.leaves_after:
                            self.counts["clients that left"] += 1
                            return "", stream.said(), True
        except ConnectionFailed as error:
            return f"connection: {error}", [], False
        except StreamFailed as error:
            return f"stream: {error}", [], False
        failure = "" if stream.is_done else "connection: the stream ended early"
        return failure, stream.said(), False

    async def _judge(self, asked: Asking, said: Said, has_left: bool) -> None:
        question = asked.question
        if self.is_control and asked.number == CONTROL_AT:
            said = [[f"{text}.", end, calls] for text, end, calls in said]
        right = self.answers.of(question.number)
        is_sample = asked.number == CONTROL_AT if self.is_control else question.number % self._args.sample == 0
        if right is None and is_sample:
            right = await self._lone(asked)
            self.answers.add(question.number, right, is_lone=True)
        if right is None:
            if not has_left:
                self.answers.add(question.number, said, is_lone=False)
            return
        self.counts["compared"] += 1
        self.counts["compared with a lone engine"] += is_sample
        if not (begins(said, right) if has_left else said == right):
            self.wrong.append(
                f"request {asked.number}, question {question.number} ({question.kind}, "
                f"{'stream' if asked.is_stream else 'whole'}): {said} is not {right}"
            )

    async def _lone(self, asked: Asking) -> Said:
        async with self._lone_lock:
            lone = Connection(self.lone_url)
            failure, said, _ = await self._ask(lone, Asking(asked.number, asked.question, False, None))
            lone.close()
        assert not failure, f"the lone engine: {failure}"
        return said

    # ------------------------------------------------------------------ between requests

    def _quiet(self) -> None:
        """No request is open."""
        for _ in range(10 if self.is_control else 200):
            found = self._fleet.faults()
            if not found:
                break
            time.sleep(0.2)  # a client that left is noticed a moment later; an engine that was killed starts
        self._look_at_times()
        self.counts["audits"] += 1
        self.audits += [f"after {self.next} requests: {one}" for one in found]
        self._write()
        self._say()

    def _restart(self) -> None:
        self.audits += _ended(self._fleet, self._fleet.restart())
        self.servers += 1
        self._look_at_times(of_starts=True)

    def _look_at_times(self, *, of_starts: bool = False) -> None:
        self.cpu.look(
            {"soak": os.getpid(), "supervisor": self._fleet.watched()["supervisor"], "lone engine": self.lone_pid},
            of_starts=of_starts,
        )

    def finish(self) -> None:
        code = self._fleet.stop()
        self.audits += _ended(self._fleet, code)
        if damaged := self._fleet.damaged_store():
            self.audits.append(f"the store: {damaged}")
        self._write()

    def _take_sample(self, number: int) -> None:
        values = {}
        for name, pid in self._fleet.watched().items():
            values |= of_process(name, pid, urlsplit(self._fleet.url).port)
        values |= of_folder("server's disk", self._fleet.disk, besides=self._fleet.fillers)
        values |= of_folder("server's temporary", self._fleet.temporary)
        sample = Sample(self.servers, number, {sys.intern(name): value for name, value in values.items()})
        self.samples.append(sample)
        with self._samples_file.open("a") as file:
            file.write(json.dumps([sample.server, sample.requests, sample.values]) + "\n")

    def _control(self, number: int) -> None:
        if not self.is_control:
            return
        if number == CONTROL_AT + 2:
            self._fleet.lose_engine()
        if number % 3 == 0:
            self._held += [os.open(os.devnull, os.O_RDONLY), os.urandom(1 << 18)]
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
            (self._fleet.temporary / f"left-{number}").write_bytes(bytes(1 << 16))

    # ------------------------------------------------------------------ state and report

    @property
    def _samples_file(self) -> Path:
        """A line for each: written once, while the state is written anew at each audit."""
        return self._folder / "samples.jsonl"

    def _read(self) -> None:
        file = self._folder / "state.json"
        if not file.exists():
            return
        state = json.loads(file.read_text())
        assert state["seed"] == self._args.seed, f"{file} is of --seed {state['seed']}"
        self.next, self.seconds, self.servers = state["next"], state["seconds"], state["servers"] + 1
        self.counts.update(state["counts"])
        self.cpu.seconds.update(state["cpu_seconds"])
        self._fleet.counts.update(state["faults"])
        self.unexplained, self.wrong, self.audits = state["unexplained"], state["wrong"], state["audits"]
        lines = self._samples_file.read_text().splitlines() if self._samples_file.exists() else []
        for server, number, values in map(json.loads, lines):
            if number < self.next:  # those behind were taken in a spell that did not end
                self.samples.append(Sample(server, number, {sys.intern(name): value for name, value in values.items()}))

    def _write(self) -> None:
        state = {
            "seed": self._args.seed,
            "next": self.next,
            "seconds": self.seconds,
            "servers": self.servers,
            "counts": self.counts,
            "cpu_seconds": self.cpu.seconds,
            "faults": self._fleet.counts,
            "unexplained": self.unexplained[:1000],
            "wrong": self.wrong[:1000],
            "audits": self.audits[:1000],
        }
        part = self._folder / "state.part"
        part.write_text(json.dumps(state))
        part.replace(self._folder / "state.json")

    def _say(self) -> None:
        print(
            f"{self.seconds:8.0f} s  {self.next:>8} requests  {self.counts['compared']:>8} compared  "
            f"{len(self.wrong)} wrong  {len(self.unexplained)} unexplained  "
            f"{len(self.audits)} audits failed  "
            f"{self._fleet.counts['engines killed']} engines killed",
            flush=True,
        )

    def report(self) -> dict[str, Any]:
        rows = slopes(self.samples)
        for row in rows:
            print(row.line())
        for title, lines in (("wrong", self.wrong), ("unexplained", self.unexplained), ("audit", self.audits)):
            for line in lines[:5]:
                print(f"{title}: {line}")
        asked, lone = self.answers.count()
        per_s = self.next / self.seconds if self.seconds else 0.0
        return {
            "requests": self.next,
            "of": self._args.requests,
            "seed": self._args.seed,
            "seconds": round(self.seconds),
            "requests_per_s": round(per_s, 2),
            "hours_for_a_million": round(1e6 / per_s / 3600, 1) if per_s else None,
            "cpu_ms_per_request": {
                kind: round(1e3 * seconds / max(1, self.next), 2) for kind, seconds in self.cpu.seconds.most_common()
            },
            "machine": machine(),
            "wrong": len(self.wrong),
            "unexplained": len(self.unexplained),
            "audits": self.counts["audits"],
            "audits_failed": len(self.audits),
            "questions": asked,
            "questions_of_a_lone_engine": lone,
            "counts": dict(sorted(self.counts.items())),
            "faults": dict(sorted(self._fleet.counts.items())),
            f"slopes_per_{PER}": {
                row.name: {
                    "slope": round(row.slope, 3),
                    "low": round(row.low, 3),
                    "high": round(row.high, 3),
                    "limit": row.limit,
                    "verdict": row.verdict,
                    "lives": [[[round(at), round(value, 2)] for at, value in one] for one in row.lives],
                }
                for row in rows
            },
            "failures": {"wrong": self.wrong[:20], "unexplained": self.unexplained[:20], "audits": self.audits[:20]},
        }


async def unnoticed(args: argparse.Namespace, fleet: Fleet, lone_url: str) -> list[str]:
    """Of the controls, those that no check has noticed."""
    folder = args.state / "controls"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    never = dict.fromkeys(EVERY, 10**9) | {"sample": 3, "audit": CONTROL_REQUESTS}
    soak = Soak(
        argparse.Namespace(
            **vars(args) | {"state": folder, "requests": CONTROL_REQUESTS, "hours": 1.0, "every": never}
        ),
        fleet,
    )
    soak.lone_url, soak.is_control = lone_url, True
    await soak.run()
    grows = {row.name for row in slopes(soak.samples) if row.verdict == "grows"}
    checks = {
        "a wrong token": len(soak.wrong) == 1,
        "an error": len(soak.unexplained) == 1,
        "a death": any("were killed" in line for line in soak.audits),
    }
    return [name for name, is_noticed in checks.items() if not is_noticed] + sorted(LEAKS - grows)


class Pace:
    """At most ``rate`` turns a second, whoever takes them."""

    def __init__(self, rate: float) -> None:
        self._apart_s = 1 / rate
        self._next_s = 0.0

    async def turn(self) -> None:
        now_s = time.monotonic()
        self._next_s = max(self._next_s + self._apart_s, now_s)
        await asyncio.sleep(self._next_s - now_s)


def keep_buffers_off_the_heap() -> None:
    """asyncio reads into 256 KiB and keeps what came. glibc gives such a buffer pages of its own, until the
    first one is freed; from then on it cuts them from the heap, and each leaves a hole that the next one does
    not fit in: 0.3 KiB a request. A limit that is set stays."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _ended(fleet: Fleet, code: int) -> list[str]:
    return [] if code == 0 else [f"the server ended with {code} after SIGTERM"]


def in_namespace() -> None:
    """Starts this program again where it may mount a disk of its own, which vanishes with it. Where the
    system does not let it, disks are never full, and the result says so."""
    if _NAMESPACE in os.environ or shutil.which("unshare") is None:
        return
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode == 0:
        os.environ[_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "-Urm", sys.executable, "-m", "benchmarks.soak_million", *sys.argv[1:]])


def mounted(folder: Path) -> bool:
    """Whether ``folder`` is a disk of its own now."""
    folder.mkdir(exist_ok=True)
    return (
        _NAMESPACE in os.environ
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "soak", str(folder)], check=False
        ).returncode
        == 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="Folder that the soak goes on from.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=200.0, help="Most requests a second.")
    parser.add_argument("--concurrency", type=int, default=384)
    parser.add_argument("--dtype", default="bfloat16", help="Of both servers, as --dtype of `weft serve`.")
    parser.add_argument("--hours", type=float, default=24.0, help="Stop after so long.")
    parser.add_argument("--sample", type=int, default=20, help="One question in so many: a lone engine.")
    parser.add_argument(
        "--every",
        action="append",
        default=[],
        metavar="KIND=N",
        help=f"Requests between two of a kind: {', '.join(EVERY)}.",
    )
    parser.add_argument("--controls", action="store_true", help="Show that each check can fail.")
    parser.add_argument("--json", type=Path, help="Write the result here.")
    args = parser.parse_args()
    in_namespace()
    keep_buffers_off_the_heap()
    args.state = args.state.resolve()
    args.state.mkdir(parents=True, exist_ok=True)
    args.every = EVERY | {kind: int(count) for kind, _, count in (one.partition("=") for one in args.every)}
    assert args.every.keys() == EVERY.keys(), f"--every has {', '.join(EVERY)}"
    fleet = Fleet(args.state, is_bounded=mounted(args.state / "disk"), dtype=args.dtype)
    soak = Soak(args, fleet)
    lone, soak.lone_url = serve(
        args.state / "lone.log",
        fleet.temporary,
        ["--dtype", args.dtype, "--threads", "1", "--memory", "96MiB", "--no-prefix-cache", "--speculate", "off"],
        responses="off",
    )
    soak.lone_pid = lone.pid
    try:
        fleet.start()
        uvloop.run(soak.run())
        missed = uvloop.run(unnoticed(args, fleet, soak.lone_url)) if args.controls else None
        soak.finish()
    finally:
        lone.terminate()
        lone.wait()
        fleet.end()
    result = soak.report() | ({} if missed is None else {"controls_unnoticed": missed})
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    grows = [name for name, row in result[f"slopes_per_{PER}"].items() if row["verdict"] == "grows"]
    return int(bool(soak.wrong or soak.unexplained or soak.audits or grows or missed))


if __name__ == "__main__":
    sys.exit(main())
