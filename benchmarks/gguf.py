"""GGUF files beside llama.cpp, in CPU time: figures that a busy machine does not move much.

    python -m benchmarks.gguf [--types q8_0,q4_k_m] [--checkpoints lfm2,granite,qwen] [--rounds 3] [--threads 1]

    one file, two servers up at once     weft    llama-server  (benchmarks.peers.make_env --llama)
    a round asks each of them in turn    prompt  one stream  32 at once  later turns
    a figure                             user and system seconds of the server's processes, medians

Load is the CPU time and the wall time until the server is healthy. Memory is the resident set of its
processes after the first round, without pages of files and with them. ``python -m benchmarks.peers.serve``
measures in wall time, for a quiet machine. The checkpoint has random weights: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from benchmarks.peers.engines import GGUF_BITS, SETTINGS, Bench
from benchmarks.peers.environment import DEFAULT_ENVIRONMENT, Environment
from benchmarks.peers.lines import Side, Talk, answered
from benchmarks.peers.serve import KEEP
from benchmarks.serve.__main__ import machine_now
from benchmarks.serve.checkpoints import FAMILIES, SIZES, make_checkpoint
from benchmarks.serve.load import LoadPlan

PROMPT = LoadPlan(requests=1, prompt_tokens=512, output_tokens=1, concurrency=1)
STREAM = LoadPlan(requests=1, prompt_tokens=16, output_tokens=128, concurrency=1)
BURST = LoadPlan(requests=32, prompt_tokens=64, output_tokens=32, concurrency=32)
TALK = Talk(conversations=1, turns=6, opening=960, own=64, output_tokens=2)


@dataclass(slots=True)
class Running:
    """A server and its processes. ``figures``: by name, of each round."""

    name: str
    side: Side
    processes: list[psutil.Process]
    figures: dict[str, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

    def add_memory(self) -> None:
        """llama.cpp maps the model: it is in its share of the pages of files."""
        each = [process.memory_full_info() for process in self.processes]
        self.add("memory, MB", sum(info.rss - info.shared for info in each) / 1e6)
        self.add("with pages of files, MB", sum(info.pss for info in each) / 1e6)

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def timed(self, ask: Callable[[], object]) -> float:
        begin = self.cpu_s()
        ask()
        return self.cpu_s() - begin


def own_processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def start(stack: ExitStack, name: str, bench: Bench) -> Running:
    before, begin = set(own_processes()), time.perf_counter()
    side = stack.enter_context(SETTINGS[name].start(bench))
    seconds = time.perf_counter() - begin
    running = Running(name, side, [one for one in own_processes() if one not in before])
    running.add("load, CPU s", running.cpu_s())
    running.add("load, s", seconds)
    return running


def ask_all(running: Running, vocab_size: int, seed: int) -> None:
    """One round. Of the stream and the burst, prompts are taken off by a round of one token. Of later turns,
    the opening is taken off by a conversation without them."""

    def load(plan: LoadPlan, more: int = 0, output_tokens: int | None = None) -> float:
        asked = replace(
            plan, vocab_size=vocab_size, seed=seed + more, output_tokens=output_tokens or plan.output_tokens
        )
        return running.timed(lambda: answered(running.side, asked))

    running.add("prompt, ms a token", 1000 * load(PROMPT) / PROMPT.prompt_tokens)
    first = load(STREAM, 1, output_tokens=1)
    running.add("one stream, ms a token", 1000 * (load(STREAM) - first) / (STREAM.output_tokens - 1))
    first = load(BURST, 1, output_tokens=1)
    tokens = BURST.requests * (BURST.output_tokens - 1)
    running.add("32 at once, ms a token", 1000 * (load(BURST) - first) / tokens)

    def talk(turns: int, more: int) -> float:
        asked = replace(TALK, turns=turns, vocab_size=vocab_size, seed=seed + more)
        return running.timed(lambda: running.side.talk(asked))

    later = talk(TALK.turns, 2) - talk(1, 1)
    running.add("a later turn, CPU s", later / (TALK.turns - 1))


def table(runs: Sequence[Running]) -> list[str]:
    rows = [f"{'':<30}" + "".join(f"{one.name:>16}" for one in runs) + f"{'ratio':>8}"]
    for name in runs[0].figures:
        medians = [statistics.median(one.figures[name]) for one in runs]
        rows.append(
            f"{name:<30}"
            + "".join(f"{value:>16,.3f}" for value in medians)
            + f"{medians[0] / max(medians[1], 1e-9):>8.2f}"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gguf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", type=lambda text: text.split(","), default=list(GGUF_BITS))
    parser.add_argument("--checkpoints", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--env", type=Path, default=DEFAULT_ENVIRONMENT)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for family, kind in itertools.product(asked.checkpoints, asked.types):
        checkpoint = make_checkpoint(family, asked.size, "bfloat16", under=KEEP)
        bench = Bench(checkpoint, Environment(asked.env), asked.threads, 600.0)
        with ExitStack() as stack:
            runs = [start(stack, f"{engine}-{kind}", bench) for engine in ("llama", "weft")]
            for number in range(asked.rounds + 1):
                for running in runs if number % 2 else reversed(runs):
                    kept = {name: list(values) for name, values in running.figures.items()}
                    ask_all(running, checkpoint.vocab_size, 1000 * number + 17)
                    if number == 0:  # warms up
                        running.figures = kept
                        running.add_memory()
            print(f"\n{checkpoint.name}, {kind}, {asked.threads} threads, medians of {asked.rounds} rounds")
            print("\n".join(table(runs)), flush=True)
            results[f"{checkpoint.name} {kind}"] = {
                one.name: {name: statistics.median(values) for name, values in one.figures.items()} for one in runs
            }
            if asked.json is not None:
                asked.json.write_text(
                    json.dumps({"machine": machine_now(asked.threads, "gguf"), "results": results}, indent=2) + "\n"
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
