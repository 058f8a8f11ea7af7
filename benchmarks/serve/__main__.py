"""python -m benchmarks.serve: weft over HTTP against transformers' generate, on this machine, now.

    --family lfm2|granite|all   --size 350m|small|tiny   --dtype bfloat16|float32
    --workload burst|single|all --rounds 3               --json FILE

Prints a table of medians and ratios, and writes the same as JSON with the facts of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.serve.checkpoints import FAMILIES, SIZES, make_checkpoint
from benchmarks.serve.compare import HIGHER_IS_BETTER, MEASURES, Comparison, compare
from benchmarks.serve.load import LoadPlan
from weft.cli.doctor import cpu_facts, memory_facts
from weft.host import usable_cores

ROOT = Path(__file__).resolve().parents[2]
KEEP = ROOT / "build" / "benchmarks"

WORKLOADS = {
    "burst": LoadPlan(requests=32, prompt_tokens=256, output_tokens=64, concurrency=32),
    "single": LoadPlan(requests=1, prompt_tokens=512, output_tokens=128, concurrency=1),
}
"""burst: 32 requests at once. single: one stream, which is the latency of an idle server."""


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    families = FAMILIES if asked.family == "all" else (asked.family,)
    names = tuple(WORKLOADS) if asked.workload == "all" else (asked.workload,)
    threads = asked.threads or usable_cores()
    results: dict[str, list[Comparison]] = {}
    machine = machine_now(threads, asked.dtype)
    for family in families:
        say(f"{family}: making the checkpoint, unless it is there")
        checkpoint = make_checkpoint(family, asked.size, asked.dtype, under=asked.keep, seed=asked.seed)
        plans = {name: _sized(WORKLOADS[name], checkpoint.vocab_size, asked.requests) for name in names}
        title = f"{checkpoint.name} ({checkpoint.parameters / 1e6:.0f}M parameters)"
        results[title] = compare(checkpoint, plans, rounds=asked.rounds, threads=threads, say=say)
    show(results, machine)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(
        json.dumps({"machine": machine, "results": {k: [asdict(c) for c in v] for k, v in results.items()}}, indent=2)
    )
    print(f"\n{os.path.relpath(asked.json)} has every round.")
    return 0


def machine_now(threads: int, dtype: str) -> dict[str, Any]:
    """What a figure must be read with."""
    return {
        "cpu": cpu_facts(),
        "memory": memory_facts(),
        "load_average": os.getloadavg(),
        "threads": threads,
        "dtype": dtype,
        "omp_wait_policy": "passive",
        "python": sys.version.split()[0],
        **{name: metadata.version(name) for name in ("weft", "torch", "transformers")},
    }


def show(results: dict[str, list[Comparison]], machine: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    cpu = machine["cpu"]
    features = ", ".join(name for name, there in (cpu["features"] or {}).items() if there)
    print(
        f"{cpu['model']}, {cpu['usable_cores']} cores ({features})\n"
        f"load {machine['load_average'][0]:.1f} at start, {machine['threads']} threads each, "
        f"OMP_WAIT_POLICY={machine['omp_wait_policy']}, {machine['dtype']}\n"
        f"weft {machine['weft']}, torch {machine['torch']}, transformers {machine['transformers']}"
    )
    for title, comparisons in results.items():
        for one in comparisons:
            plan = one.plan
            table = Table(
                title=f"{title}\n{one.workload}: {plan.requests} x {plan.prompt_tokens} -> "
                f"{plan.output_tokens} tokens, medians of {len(one.rounds) // 2} rounds"
            )
            for column in ("", "weft", "transformers", "ratio"):
                table.add_column(column, justify="left" if not column else "right")
            for measure in MEASURES:
                unit, scale = ("", 1.0) if measure in HIGHER_IS_BETTER else (" (ms)", 1e3)
                name = measure.replace("_per_s", " per s").removesuffix("_s").replace("_", " ") + unit
                table.add_row(
                    name,
                    _number(one.weft[measure], scale),
                    _number(one.transformers[measure], scale),
                    _number(one.ratios[measure]),
                )
            table.caption = (
                f"ratio above 1: weft is better\nsame tokens for {one.same_prefix:.0%} of each "
                "answer's length (mean; bfloat16: near ties fall either way)"
            )
            Console(width=88).print(table)


def _number(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    shown = value * scale
    return f"{shown:,.0f}" if shown >= 100 else f"{shown:.3g}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _sized(plan: LoadPlan, vocab_size: int, requests: int | None) -> LoadPlan:
    """The plan for a vocabulary, with another number of requests where one was asked for."""
    if requests is None or plan.requests == 1:
        return replace(plan, vocab_size=vocab_size)
    return replace(plan, vocab_size=vocab_size, requests=requests, concurrency=requests)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "weft over HTTP against transformers' generate, on this machine, now."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=about)
    parser.add_argument("--family", choices=(*FAMILIES, "all"), default="lfm2")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--workload", choices=(*WORKLOADS, "all"), default="all")
    parser.add_argument("--requests", type=int, help="requests of the burst; default: 32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: all usable cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=KEEP, help="folder that keeps the checkpoints")
    parser.add_argument("--json", type=Path, default=KEEP / "serve.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
