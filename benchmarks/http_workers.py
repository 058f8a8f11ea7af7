"""Streamed tokens a second with one HTTP process and with several, and the CPU time that each process takes.

    python -m benchmarks.http_workers --workers 1 2 --streams 32 --tokens 400

The engine is scripted: a step takes 5 ms (--engine) and gives each stream a token. So HTTP is the bottleneck
as far as cores allow. CPU time for each token says how many workers one supervisor can feed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import psutil

from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory

_REQUEST = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Content-Length: {size}\r\nConnection: close\r\n\r\n{body}"
)


async def stream(port: int, tokens: int) -> int:
    """Chunks of one stream, by a client that costs little."""
    body = json.dumps({"prompt": "sing", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_REQUEST.format(size=len(body), body=body).encode())
    chunks = 0
    while data := await reader.read(1 << 16):
        chunks += data.count(b"data: {")
    writer.close()
    return chunks


def cpu_seconds(server: RunningServer) -> dict[str, float]:
    """By kind of process."""
    total = {"supervisor": 0.0, "worker": 0.0, "engine": 0.0}
    main = psutil.Process(server.process.pid)
    for process in (main, *main.children()):
        command = " ".join(process.cmdline())
        kind = (
            "worker"
            if "workers.process" in command
            else "engine"
            if "engine_process" in command
            else "supervisor"
            if process == main
            else ""
        )
        if kind:
            total[kind] += time.clock_gettime(_cpu_clock(process.pid))
    return total


def _cpu_clock(pid: int) -> int:
    """The clock of all CPU time of a process, in nanoseconds; the system's counters have ticks of 10 ms."""
    return ~pid << 3 | 2


async def load(port: int, streams: int, tokens: int) -> tuple[int, float]:
    began_s = time.perf_counter()
    chunks = sum(await asyncio.gather(*(stream(port, tokens) for _ in range(streams))))
    return chunks, time.perf_counter() - began_s


def measure(directory: Path, factory: str, workers: int, streams: int, tokens: int, interval: int) -> None:
    with running_server(
        factory,
        engine={"model": str(directory)},
        server={"http_workers": workers, "log_level": "warning", "stream_interval": interval},
    ) as server:
        port = int(server.url.rpartition(":")[2])
        asyncio.run(load(port, streams, 20))
        before = cpu_seconds(server)
        chunks, took_s = asyncio.run(load(port, streams, tokens))
        after = cpu_seconds(server)
    costs = "  ".join(f"{kind} {1e6 * (after[kind] - before[kind]) / (streams * tokens):5.1f} us" for kind in after)
    print(
        f"{workers} HTTP processes: {streams * tokens / took_s:7.0f} tokens/s in {chunks} chunks; "
        f"CPU time a token: {costs}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--engine",
        choices=("build", "build_paced", "build_slow", "build_wide"),
        default="build_slow",
        help="Steps of no time, 1 ms, 5 ms or 30 ms.",
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--stream-interval", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model_directory(Path(folder))
        for workers in asked.workers:
            measure(directory, asked.engine, workers, asked.streams, asked.tokens, asked.stream_interval)


if __name__ == "__main__":
    main()
