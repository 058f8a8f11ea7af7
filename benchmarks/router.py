"""What routing a request costs the HTTP process, with many snapshots known.

    python -m benchmarks.router [--snapshots 100000] [--replicas 4] [--repeats 200]

The table holds --snapshots, in equal parts of all replicas: conversations of up to 16,384 tokens, each with
a state every 512. A request of each length is routed as the fleet does it: choose, placed, admitted, ended.
Half of the prompts continue a known conversation. Printed are the medians in microseconds: of the whole, and
of the part that reads the prompt (a Python list becomes an array, and its digests are computed).
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

import numpy as np

from weft.costs.step import StepCost
from weft.prefix_digests import prefix_digests
from weft.router.protocol import ReplicaLoad, RoutedRequest
from weft.router.seconds import Seconds
from weft.snapshot_report import ReportedSnapshot, SnapshotReport
from weft.units import PAGE_TOKENS

CONVERSATION_TOKENS = 16_384
STATE_EVERY = 512
LENGTHS = (256, 1024, 2048, 4096, 16_384, 65_536)
COSTS = StepCost(fixed_s=5e-3, token_s=5e-6, pair_s=1e-11, decode_s=2e-4, steps=100)


def conversation(number: int, length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.random.default_rng(number).integers(0, 150_000, length, dtype=np.int32)


def filled_router(snapshots: int, replicas: int) -> tuple[Seconds, int]:
    """The router, and how many conversations it knows."""
    router = Seconds(time.monotonic)
    each = CONVERSATION_TOKENS // STATE_EVERY
    count = -(-snapshots // each)
    added: list[list[ReportedSnapshot]] = [[] for _ in range(replicas)]
    for number in range(count):
        digests = prefix_digests(conversation(number, CONVERSATION_TOKENS), "")
        for position in range(STATE_EVERY, CONVERSATION_TOKENS + 1, STATE_EVERY):
            added[number % replicas].append(ReportedSnapshot(int(digests[position // PAGE_TOKENS - 1]), position))
    for replica, one in enumerate(added):
        router.joined(replica)
        router.reported(replica, SnapshotReport(number=1, added=one, is_full=True))
    assert sum(counts.snapshots for counts in router.counts().values()) >= snapshots
    return router, count


def measured(router: Seconds, known: int, length: int, replicas: int, repeats: int) -> tuple[float, float]:
    """Median microseconds of a request, and of reading its prompt."""
    rng = random.Random(length)
    loads = [ReplicaLoad(replica, 3, 9000, rows=64, costs=COSTS) for replica in range(replicas)]
    whole, reading = [], []
    for at in range(repeats):
        number = rng.randrange(known) if at % 2 else known + at
        request = RoutedRequest(str(at), conversation(number, length).tolist())
        begin_s = time.perf_counter()
        prefix_digests(request.tokens, "")
        read_s = time.perf_counter()
        route = router.choose(request, loads)
        router.placed(request, route)
        router.admitted(request.request_id, route.predicted_tokens)
        router.ended(request.request_id)
        whole.append(time.perf_counter() - read_s)
        reading.append(read_s - begin_s)
    return median(whole) * 1e6, median(reading) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    router, known = filled_router(args.snapshots, args.replicas)
    print(f"{args.snapshots:,} snapshots on {args.replicas} replicas, microseconds a request")
    print(f"{'prompt':>8}  {'routing':>8}  {'of it, reading the prompt':>26}")
    for length in LENGTHS:
        whole, reading = measured(router, known, length, args.replicas, args.repeats)
        print(f"{length:>8,}  {whole:>8.0f}  {reading:>26.0f}")


if __name__ == "__main__":
    main()
