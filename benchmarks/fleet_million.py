"""10^6 requests through 100 replicas in virtual time, with faults: no request lost, none answered twice.

    python -m benchmarks.fleet_million --requests 1000000 --replicas 100 --seeds 50

Fleet, replicas, placement and router are those of ``weft serve``; engines and links are simulated
(``tests/support/virtual_fleet.py`` has the laws). Each seed is a fleet of its own. Every second one has
roles: prompts are split there, and records of some do not arrive. Seeds run on all cores. A law that breaks
is printed with its seed, and ``--only SEED`` runs that one again; the exit code is 1.

Seconds are of the simulation, and no measure of a fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.soak_million.__main__ import machine
from tests.support.virtual_fleet import LawBroken, World


def one_seed(seed: int, requests: int, replicas: int) -> tuple[int, float, dict[str, int], str]:
    """The seed, its CPU seconds, what happened, the law that it broke or ""."""
    began_s = time.process_time()
    world = World(seed=seed, requests=requests, replicas=replicas, own=replicas * 6 // 10, roles=seed % 2 == 1)
    try:
        counts, broken = world.run(), ""
    except LawBroken as error:
        counts, broken = world.counts, str(error)
    return seed, time.process_time() - began_s, dict(counts), broken


def simulate(requests: int, replicas: int, seeds: list[int], processes: int) -> dict[str, Any]:
    began_s = time.monotonic()
    each = -(-requests // len(seeds))
    total, cpu_s, broken = Counter[str](), {}, []
    with ProcessPoolExecutor(processes) as pool:
        for seed, seconds, counts, law in pool.map(one_seed, seeds, [each] * len(seeds), [replicas] * len(seeds)):
            total.update(counts)
            cpu_s[seed] = seconds
            if law:
                broken.append(law)
                print(law, file=sys.stderr, flush=True)
    slowest = max(cpu_s, key=lambda seed: cpu_s[seed])
    return {
        "requests": total["requests"],
        "replicas": replicas,
        "seeds": len(seeds),
        "requests_per_seed": each,
        "laws_broken": broken,
        "processes": processes,
        "wall_s": round(time.monotonic() - began_s),
        "cpu_s": round(sum(cpu_s.values())),
        "slowest_seed": slowest,
        "slowest_seed_cpu_s": round(cpu_s[slowest], 1),
        "machine": machine(),
        "load_1min": round(os.getloadavg()[0], 1),
        "counts": dict(sorted(total.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="This seed alone, as it ran among the others.")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))
    requests = args.requests
    if args.only is not None:
        requests, seeds = -(-requests // args.seeds), [args.only]
    result = simulate(requests, args.replicas, seeds, min(args.processes, len(seeds)))
    for name, count in result["counts"].items():
        print(f"{name:<36}{count:>14,}")
    for name in ("seeds", "replicas", "wall_s", "cpu_s", "slowest_seed", "slowest_seed_cpu_s", "machine"):
        print(f"{name.replace('_', ' '):<36}{result[name]:>14}")
    print(f"{'laws broken':<36}{len(result['laws_broken']):>14}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(result["laws_broken"]))


if __name__ == "__main__":
    sys.exit(main())
