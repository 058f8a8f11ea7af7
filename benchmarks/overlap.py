"""What it brings to plan the next step while one is computed: the same work with debug.overlap on and off.

    python -m benchmarks.overlap [--model PATH] [--running 1 16 64] [--tokens 64] [--rounds 5] [--threads N]

One process runs two engines over the same checkpoint, with rounds in turn (on, off, off, on, ...). So other
load on the machine falls on both. A round is ``running`` requests of 32 prompt tokens with answers of
``tokens`` tokens; its events are encoded as the engine's process does for the server. Printed: milliseconds
of a decode step, the median over rounds, and the ratio (above 1: overlap is faster). ``--python`` makes a
model of 24 layers with next to nothing in each (``benchmarks.step_python``): then the work to hide is the
host's own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from benchmarks.step_python import make_checkpoint
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams

PROMPT_TOKENS = 32


def engine(model: str | None, overlap: Literal["on", "off"], running: int, threads: int | None) -> EngineCore:
    return assemble(
        EngineConfig(
            model=model,
            memory="512MiB",
            max_model_len=1024,
            max_num_seqs=running,
            threads=threads,
            overlap=overlap,
            prefix_cache=False,
        )
    ).core


def one_round(core: EngineCore, number: int, running: int, tokens: int) -> float:
    """Seconds of a decode step."""
    random = np.random.default_rng(number)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for at in range(running):
        prompt = random.integers(5, core.vocab_size - 5, PROMPT_TOKENS).tolist()
        core.submit(Request(request_id=f"{number}-{at}", prompt_tokens=prompt, sampling=sampling))
    while len(core.scheduler.waiting) or core.stats().last_step_decodes < running:
        core.step()
    before, began = core.stats().steps, time.perf_counter()
    steps = 0
    while core.has_work:
        msgspec.msgpack.encode(core.step())
        if core.scheduler.running:
            steps = core.stats().steps - before
            took = time.perf_counter() - began
    if core.failure is not None:
        raise core.failure
    return took / steps


def compare(model: str | None, running: int, tokens: int, rounds: int, threads: int | None) -> None:
    cores = {name: engine(model, name, running, threads) for name in ("on", "off")}  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds + 1):
        for name in ("on", "off") if number % 2 else ("off", "on"):
            taken = one_round(cores[name], number, running, tokens)
            if number:  # the first warms up
                seconds[name].append(taken)
    on, off = (float(np.median(seconds[name])) * 1e3 for name in ("on", "off"))
    print(f"{running:>8}{on:>12.2f}{off:>12.2f}{off / on:>9.3f}", flush=True)
    for core in cores.values():
        core.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint; default: the embedded model")
    parser.add_argument("--python", action="store_true", help="24 tiny layers")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    print(f"{'running':>8}{'on ms':>12}{'off ms':>12}{'off/on':>9}")
    with tempfile.TemporaryDirectory() as under:
        model = make_checkpoint("qwen", 24, Path(under)) if args.python else args.model
        for running in args.running:
            compare(model, running, args.tokens, args.rounds, args.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
