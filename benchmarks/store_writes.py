"""What writes to a store cost the load beside them: tokens a second, CPU time and the slowest steps.

    python -m benchmarks.store_writes [--model DIR] [--seconds 240] [--json FILE]

Two engines in one process take turns, one of them with a store in a temporary directory. A turn is a
*segment* of some seconds: prompts of 20 to 900 tokens, some with a shared front, answers of 8 to 60 tokens,
arriving while others run. Both engines get the same segment, in alternating order, and the ratio of the two
is one sample. No prompt comes twice, so nothing is restored: what is measured are writes.

    throughput    tokens a second, with / without          other load on the machine scatters it
    cpu           CPU time a token, without / with         all threads of the process; little scatters it
    step_p99      of all steps; ``cpu`` of it: the CPU time of the engine's thread alone

After a segment the engine with a store writes what it still has. The CPU time of that counts, and its seconds
do not: a server would do it beside the next requests. Each ratio is the median of the segments, with its
quartiles. ``parts`` has the CPU time of each part of the write path, as shares of the CPU time of the engine
with a store. The file system's own threads are in none of it.

The first segment of each engine warms up and is not counted. Without --model it is LFM2-350M-like with random
weights in bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams

REQUESTS = 5
RUNNING_MAX = 4
DRAIN_S = 30.0
SEGMENTS_MIN = 4


def requests_of(segment: int, vocab: int) -> list[Request]:
    """Those of one segment."""
    chance, rng = Random(segment), np.random.default_rng(segment)
    front = rng.integers(3, vocab, 300).tolist()
    requests = []
    for number in range(REQUESTS):
        own = rng.integers(3, vocab, chance.randrange(20, 600)).tolist()
        prompt = [*front, *own] if chance.random() < 0.5 else own
        sampling = SamplingParams(temperature=0.0, max_tokens=chance.randrange(8, 60), ignore_eos=True)
        requests.append(Request(request_id=f"{segment}-{number}", prompt_tokens=prompt, sampling=sampling))
    return requests


@dataclass
class Segment:
    """``cpu_s``: of the process, what is written afterwards included. ``steps``: (seconds, CPU seconds of the
    engine's thread) of each."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    drain_s: float = 0.0
    steps: list[tuple[float, float]] = field(default_factory=list)


def play(core: EngineCore, number: int) -> Segment:
    waiting, segment = requests_of(number, core.vocab_size), Segment()
    gc.collect()
    before, cpu_s, began = core.computed_tokens, time.process_time(), time.perf_counter()
    while waiting or (core.has_work and core.live_count):
        while waiting and core.live_count < RUNNING_MAX:
            core.submit(waiting.pop(0))
        at, cpu_at = time.perf_counter(), time.thread_time()
        core.step()
        segment.steps.append((time.perf_counter() - at, time.thread_time() - cpu_at))
        if core.failure is not None:
            raise core.failure
    ended = time.perf_counter()
    segment.tokens, segment.seconds = core.computed_tokens - before, ended - began
    while core.store is not None and core.store.is_waiting and time.perf_counter() < ended + DRAIN_S:
        if core.has_work:
            core.step()
        else:
            core.poll_store()
            time.sleep(0.01)
    segment.drain_s, segment.cpu_s = time.perf_counter() - ended, time.process_time() - cpu_s
    return segment


class Parts:
    """CPU seconds inside functions of the write path, by name, over all calls."""

    def __init__(self) -> None:
        from weft.runner.transfers import HostTransfers
        from weft.schedule.store_tier import StoreTier
        from weft.store import writing
        from weft.store.ledger import LedgerFiles
        from weft.store.space import Volumes

        self.seconds: dict[str, float] = defaultdict(float)
        for name, owner, function in (
            ("write thread", writing.WriteThread, "_write"),
            ("its payloads", Volumes, "write"),
            ("its checksums", writing, "payload_checksum"),
            ("its syncs", Volumes, "sync"),
            ("its rows", LedgerFiles, "append"),
            ("copies", HostTransfers, "perform"),
            ("polls", StoreTier, "poll"),
            ("commits", StoreTier, "committed"),
            ("puts", StoreTier, "finished"),
        ):
            self._time(name, owner, function)

    def _time(self, name: str, owner: Any, function: str) -> None:
        plain = getattr(owner, function)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return plain(*args, **options)
            finally:
                self.seconds[name] += time.thread_time() - began

        setattr(owner, function, timed)


def spread(ratios: Sequence[float]) -> dict[str, float]:
    low, median, high = np.percentile(ratios, (25, 50, 75))
    return {"median": float(median), "quartile_low": float(low), "quartile_high": float(high), "segments": len(ratios)}


def measure(model: str, seconds: float, under: Path) -> dict[str, Any]:
    """Segments until ``seconds`` have passed, at least SEGMENTS_MIN pairs."""
    from weft.assemble import assemble
    from weft.config import EngineConfig

    common: dict[str, Any] = {"model": model, "memory": "512MiB", "device": "cpu", "max_model_len": 2048}
    arms = {
        "without": assemble(EngineConfig(**common)).core,
        "with": assemble(
            EngineConfig(**common, store=str(under / "store"), store_size="4GiB", store_reserve="1GiB")
        ).core,
    }
    parts, played = Parts(), dict[str, list[Segment]]({name: [] for name in arms})
    end = time.perf_counter() + seconds
    number = 0
    while number <= SEGMENTS_MIN or time.perf_counter() < end:
        for name in sorted(arms, reverse=bool(number % 2)):
            segment = play(arms[name], number)
            print(
                f"segment {number}  {name:8s} {segment.tokens / segment.seconds:8.1f} tokens/s "
                f"{1e3 * segment.cpu_s / segment.tokens:8.3f} ms of CPU a token",
                file=sys.stderr,
            )
            if number:
                played[name].append(segment)
        if not number:
            parts.seconds.clear()
        number += 1
    stats = arms["with"].stats().store
    assert stats is not None
    for core in arms.values():
        core.close()
    return report_of(played, parts, stats.writes.written, stats.store.written_bytes)


def report_of(played: dict[str, list[Segment]], parts: Parts, written: int, written_bytes: int) -> dict[str, Any]:
    pairs = list(zip(played["with"], played["without"], strict=True))
    assert all(one.tokens == other.tokens for one, other in pairs), "both engines compute the same tokens"
    cpu_s = sum(segment.cpu_s for segment in played["with"])
    report: dict[str, Any] = {
        "throughput": spread([other.seconds / one.seconds for one, other in pairs]),
        "cpu": spread([other.cpu_s / one.cpu_s for one, other in pairs]),
    }
    for at, name in enumerate(("step_p99", "step_p99_cpu")):
        p99 = {
            arm: float(np.percentile([step[at] for segment in segments for step in segment.steps], 99))
            for arm, segments in played.items()
        }
        report[name] = {**p99, "ratio": p99["with"] / p99["without"]}
    for arm, segments in played.items():
        tokens = sum(segment.tokens for segment in segments)
        report[arm] = {
            "tokens": tokens,
            "tokens_per_second": tokens / sum(segment.seconds for segment in segments),
            "cpu_ms_a_token": 1e3 * sum(segment.cpu_s for segment in segments) / tokens,
            "steps": sum(len(segment.steps) for segment in segments),
        }
    return {
        **report,
        "drain_s": sum(segment.drain_s for segment in played["with"]),
        "written": written,
        "written_bytes": written_bytes,
        "parts": {name: part_s / cpu_s for name, part_s in sorted(parts.seconds.items())},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a checkpoint, not the random one")
    parser.add_argument("--size", default="350m", help="of the random checkpoint: tiny, small or 350m")
    parser.add_argument("--seconds", type=float, default=240.0, help="of all segments, without the start")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    under = Path(tempfile.mkdtemp(prefix="weft-writes-"))
    try:
        model = args.model
        if model is None:
            from benchmarks.serve.checkpoints import make_checkpoint

            model = str(make_checkpoint("lfm2", args.size, "bfloat16", under=under).directory)
        report = measure(model, args.seconds, under)
    finally:
        shutil.rmtree(under, ignore_errors=True)
    print(json.dumps(report, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
