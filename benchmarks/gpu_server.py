"""A server of random weights on the GPU that is there, loaded over HTTP: a line of "@{json}" for each result.

    python -m benchmarks.gpu_server [--geometry Qwen3.5-4B] [--layers N] [--device cuda]

    gpu_checkpoint --> a temporary directory --> weft serve: the seconds of its start, what it said
                                                   |
                       weft bench serve -----------'  one load after the other: the file of its results

Each load has a time limit of its own. One that fails leaves the others their turn. ``--layers``, for a look
at a small machine, makes the loads small too.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

START_S, LOAD_S = 150, 60
READY = "weft serves"
KEPT = (
    "completed",
    "failed",
    "duration",
    "output_throughput",
    "total_token_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "p99_itl_ms",
)
LOADS = {
    "one stream": (2, 1, 512, 256),
    "64 at once": (192, 64, 512, 128),
    "256 at once": (512, 256, 512, 256),
    "30,000 tokens": (1, 1, 30_000, 8),
    "the same again": (1, 1, 30_000, 8),
}
"""Prompts, at once, tokens of each, tokens of each answer."""
SMALL = {"one stream": (2, 1, 16, 4), "4 at once": (8, 4, 16, 4)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--geometry", default="Qwen3.5-4B", help="of `weft plan`'s table")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serve", default="", help="flags of weft serve, in one word: --serve='--http-workers 4'")
    args, _ = parser.parse_known_args(argv)  # the rest is for other parts of the first run
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        layers = ["--layers", str(args.layers)] if args.layers else []
        subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_checkpoint", args.geometry, str(model), *layers], check=True
        )
        flags = ["--device", args.device, *args.serve.split()]
        for result in served(model, SMALL if args.layers else LOADS, flags):
            print("@" + json.dumps(result), flush=True)
    return 0


def served(model: Path, loads: dict[str, tuple[int, int, int, int]], flags: Sequence[str]) -> Iterator[dict[str, Any]]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "weft", "serve", str(model), "--port", str(port), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said = lines_until_ready(server, began + START_S)
        ready = any(READY in line for line in said)
        yield {"name": "start", "seconds": time.monotonic() - began, "ready": ready, "said": said[-40:]}
        for name, load in loads.items() if ready else ():
            yield {"name": name} | measured(port, load, model.parent / f"{name}.json")
        if ready:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            yield {"name": "metrics", "lines": [line for line in lines if not line.startswith("#")]}
    finally:
        server.terminate()
        server.wait(30)


def lines_until_ready(server: subprocess.Popen[str], ends_s: float) -> list[str]:
    """What the server says until it is ready, ends, or has no time left. Later lines are read and dropped."""
    said: list[str] = []
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while not said or READY not in said[-1]:
        try:
            line = lines.get(timeout=max(0.01, ends_s - time.monotonic()))
        except queue.Empty:
            return said
        if line is None:
            return said
        print(line, flush=True)
        said.append(line)
    return said


def measured(port: int, load: tuple[int, int, int, int], path: Path) -> dict[str, Any]:
    prompts, at_once, read, answered = load
    asked = [
        sys.executable,
        "-m",
        "weft",
        "bench",
        "serve",
        "--port",
        str(port),
        "--num-prompts",
        str(prompts),
        "--max-concurrency",
        str(at_once),
        "--input-len",
        str(read),
        "--output-len",
        str(answered),
        "--save-result",
        "--result-dir",
        str(path.parent),
        "--result-filename",
        path.name,
    ]
    try:
        ran = subprocess.run(asked, capture_output=True, text=True, timeout=LOAD_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {LOAD_S} s"}
    if not path.is_file():
        return {"error": ran.stdout[-1000:] + ran.stderr[-1000:]}
    result = json.loads(path.read_text())
    return {key: result[key] for key in KEPT if key in result}


if __name__ == "__main__":
    raise SystemExit(main())
