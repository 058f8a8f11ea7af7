"""Many thousand requests through the real engine in virtual time, with faults: laws, liveness, determinism.

    python -m benchmarks.soak --requests 10000 --seed 1

Half of the requests go through one engine that never restarts. The others go through many small engines whose
devices fall off the bus now and then. Both have the simulator's kinds of trouble: memory for
little more than one sequence; bursts longer than the queue; cancels between and inside steps; twins; resumed
conversations; flushes while a step is in flight; many choices of ``--snapshots``. After each step all books
are recounted from their owners. Every answer is compared with the right one, and every page and state that is
read with its right content. The best sequence must make progress.

A failure prints the seed, the law and the last steps, and ends with code 1: the same command finds it again,
and ``--only SEED`` runs that scenario alone. Nothing here is a measurement: the seconds are of the checks.

The last line is a digest of everything that was planned and answered: two runs with the same arguments print
the same one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path

from tests.support.sharing import sharing_scenario
from tests.support.simulator import Outcome, Simulation, SimulationFailed
from tests.support.workload import Scenario

_SEEDS_APART = 1_000_003
"""So that soaks of neighbouring seeds have no scenario in common."""


def long_scenario(seed: int, requests: int) -> Scenario:
    """One engine for all of them: it does not fail and forgets nothing but what memory forces it to."""
    scenario = sharing_scenario(seed, requests=requests)
    return replace(scenario, fail_in_step=None, flush_every_steps=0)


def scenarios(seed: int, requests: int) -> Iterator[Scenario]:
    """``requests`` of them in all, or a few more."""
    first = seed * _SEEDS_APART
    yield long_scenario(first, requests // 2)
    left = requests - requests // 2
    while left > 0:
        first += 1
        scenario = sharing_scenario(first)
        left -= len(scenario.arrivals)
        yield scenario


def soak(
    seed: int,
    requests: int,
    *,
    only: int | None = None,
    quiet: bool = False,
    trace: Callable[[str], None] = lambda digest: None,
) -> Counter[str]:
    """What happened, added up. ``trace`` is told the digest of each engine's run. Raises SimulationFailed."""
    total = Counter[str]()
    began = said = time.monotonic()
    for scenario in scenarios(seed, requests):
        if only is not None and scenario.seed != only:
            continue
        outcome: Outcome = Simulation(scenario).run()
        trace(outcome.trace_hash)
        total["requests"] += len(scenario.arrivals)
        total["engines"] += 1
        total.update({name: value for name, value in asdict(outcome).items() if isinstance(value, int)})
        total.update({f"ended by {reason}": count for reason, count in outcome.ended.items()})
        if not quiet and (total["engines"] == 1 or time.monotonic() - said > 10):
            said = time.monotonic()
            print(
                f"{said - began:6.0f} s  {total['requests']:>7} requests  {total['steps']:>9} steps  "
                f"{total['hits']:>6} hits  {total['preemptions']:>6} preemptions  "
                f"{total['evicted_pages']:>8} pages evicted",
                flush=True,
            )
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the seed of a failure: that scenario alone")
    parser.add_argument("--json", type=Path, help="write the sums to this file")
    args = parser.parse_args()
    digests: list[str] = []
    began = time.monotonic()
    try:
        total = soak(args.seed, args.requests, only=args.only, trace=digests.append)
    except SimulationFailed as failure:
        print(
            f"{failure}\n\nagain: python -m benchmarks.soak --requests {args.requests} --seed {args.seed} "
            f"--only {str(failure).split(':')[0].removeprefix('seed ')}",
            file=sys.stderr,
        )
        return 1
    for name, count in sorted(total.items()):
        print(f"{name.replace('_', ' '):<26}{count:>12,}")
    digest = blake2b("".join(digests).encode(), digest_size=16).hexdigest()
    print(f"{'digest':<26}{digest}")
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {
                    "requests": args.requests,
                    "seed": args.seed,
                    "seconds": round(time.monotonic() - began),
                    "laws_broken": 0,
                    "digest": digest,
                    "sums": dict(sorted(total.items())),
                },
                indent=1,
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
