"""What writes to a store cost the load beside them: tokens a second and the slowest steps, with and without.

    python -m benchmarks.store_writes --model DIR [--rounds 4] [--json FILE]

Two engines in one process take turns, one of them with a store in a temporary directory. Each round has its
own requests, the same for both: prompts of 20 to 900 tokens, some with a shared front, answers of 8 to 60
tokens, arriving while others run. No prompt comes twice, so nothing is restored: what is measured are writes.
The first round warms up and is not counted. The order of the two engines alternates.

Without --model it is LFM2-350M-like with random weights in bfloat16.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams

REQUESTS = 16
RUNNING_MAX = 6


def requests_of(round_: int, vocab: int) -> list[Request]:
    """Those of one round."""
    chance, rng = Random(round_), np.random.default_rng(round_)
    front = rng.integers(3, vocab, 300).tolist()
    requests = []
    for number in range(REQUESTS):
        own = rng.integers(3, vocab, chance.randrange(20, 600)).tolist()
        prompt = [*front, *own] if chance.random() < 0.5 else own
        sampling = SamplingParams(temperature=0.0, max_tokens=chance.randrange(8, 60), ignore_eos=True)
        requests.append(Request(request_id=f"{round_}-{number}", prompt_tokens=prompt, sampling=sampling))
    return requests


def play(core: EngineCore, round_: int) -> tuple[int, float, list[float]]:
    """(tokens computed, seconds, seconds of each step) of a round."""
    waiting, steps = requests_of(round_, core.vocab_size), []
    before, began = core.computed_tokens, time.perf_counter()
    while waiting or (core.has_work and core.live_count):
        while waiting and core.live_count < RUNNING_MAX:
            core.submit(waiting.pop(0))
        at = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - at)
        if core.failure is not None:
            raise core.failure
    return core.computed_tokens - before, time.perf_counter() - began, steps


def measure(model: str, rounds: int, under: Path) -> dict[str, Any]:
    from weft.assemble import assemble
    from weft.config import EngineConfig

    common: dict[str, Any] = {"model": model, "memory": "512MiB", "device": "cpu", "max_model_len": 2048}
    arms = {"without": assemble(EngineConfig(**common)).core,
            "with": assemble(EngineConfig(**common, store=str(under / "store"), store_size="4GiB",
                                          store_reserve="1GiB")).core}
    sums: dict[str, list[Any]] = {name: [0, 0.0, []] for name in arms}
    gc.collect()
    for round_ in range(rounds + 1):
        for name in sorted(arms, reverse=bool(round_ % 2)):
            tokens, seconds, steps = play(arms[name], round_)
            print(f"round {round_}  {name:8s} {tokens / seconds:8.1f} tokens/s", flush=True)
            if round_:
                total = sums[name]
                total[0], total[1], total[2] = total[0] + tokens, total[1] + seconds, total[2] + steps
    stats = arms["with"].stats().store
    assert stats is not None
    report: dict[str, Any] = {name: {"tokens_per_second": tokens / seconds, "steps": len(steps),
                                     "step_p50_s": float(np.percentile(steps, 50)),
                                     "step_p99_s": float(np.percentile(steps, 99))}
                              for name, (tokens, seconds, steps) in sums.items()}
    report["written"] = stats.writes.written
    report["written_bytes"] = stats.store.written_bytes
    report["throughput"] = report["with"]["tokens_per_second"] / report["without"]["tokens_per_second"]
    report["step_p99"] = report["with"]["step_p99_s"] / report["without"]["step_p99_s"]
    for core in arms.values():
        core.close()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a checkpoint, not the random one")
    parser.add_argument("--size", default="350m", help="of the random checkpoint: tiny, small or 350m")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    under = Path(tempfile.mkdtemp(prefix="weft-writes-"))
    try:
        model = args.model
        if model is None:
            from benchmarks.serve.checkpoints import make_checkpoint

            model = str(make_checkpoint("lfm2", args.size, "bfloat16", under=under).directory)
        report = measure(model, args.rounds, under)
    finally:
        shutil.rmtree(under, ignore_errors=True)
    print(json.dumps(report, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
