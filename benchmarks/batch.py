"""The same requests through ``weft batch`` and through ``weft bench throughput``, in turns.

    python -m benchmarks.batch [--lines 300] [--rounds 3] [--model DIR] [--json FILE]

``bench throughput`` gives all prompts to an engine in its own process and drops the answers. ``batch`` reads
JSON lines and writes answers into a file, and its engine has a process of its own. Prompts are words drawn
by a seed, 60 to 200 of them; half of the prompts begin with one of four shared texts. Each answer has 16 to
48 tokens, greedy, past any end. Neither clock counts the start of the engine. The last line has the median
of all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.config import EngineConfig
from weft.server.batches.answering import run_file
from weft.server.config import ServerConfig

WORDS = (
    "river",
    "mill",
    "stone",
    "key",
    "red",
    "lamp",
    "horse",
    "field",
    "bread",
    "winter",
    "song",
    "boat",
    "house",
    "green",
    "paper",
    "story",
)


def write_requests(directory: Path, count: int, seed: int) -> tuple[Path, Path]:
    """(input of batch, dataset of bench) with equal requests."""
    draw = random.Random(seed)
    shared = [" ".join(draw.choices(WORDS, k=60)) for _ in range(4)]
    lines: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for number in range(count):
        prompt = " ".join(draw.choices(WORDS, k=draw.randint(60, 200)))
        if number % 2:
            prompt = f"{draw.choice(shared)} {prompt}"
        tokens = draw.randint(16, 48)
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        samples.append({"prompt": prompt, "output_tokens": tokens})
    paths = directory / "in.jsonl", directory / "dataset.jsonl"
    for path, rows in zip(paths, (lines, samples), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def batch_seconds(source: Path, model: str | None) -> float:
    output = source.with_name("out.jsonl")
    output.unlink(missing_ok=True)
    server = ServerConfig(file_store="off", response_store="off")
    counts = run_file(
        source, output, EngineConfig(model=model), server, on_progress=lambda text: None, on_answer=lambda counts: None
    )
    assert counts.complete
    assert not counts.failed
    return counts.seconds


def bench_seconds(dataset: Path, count: int, model: str | None) -> float:
    result = dataset.with_name("bench.json")
    command = [
        sys.executable,
        "-m",
        "weft",
        "bench",
        "throughput",
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(dataset),
        "--num-prompts",
        str(count),
        "--output-json",
        str(result),
        *([model] if model else []),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return float(json.loads(result.read_text())["elapsed_time"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="weft batch beside weft bench throughput.")
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.rounds):
            source, dataset = write_requests(Path(name), args.lines, seed=number)
            with contextlib.redirect_stdout(io.StringIO()):
                batch = batch_seconds(source, args.model)
                bench = bench_seconds(dataset, args.lines, args.model)
            pairs.append((batch, bench))
            print(f"round {number + 1}: batch {batch:.2f} s, bench throughput {bench:.2f} s", flush=True)
    batch, bench = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{args.lines} requests: batch {args.lines / batch:.1f} a second, bench throughput "
        f"{args.lines / bench:.1f}; batch is {bench / batch:.2f} times as fast"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"lines": args.lines, "pairs": pairs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
