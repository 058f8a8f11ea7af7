"""weft's memory and scheduler beside vLLM's, neither with a model: microseconds, in turn, in one run.

    python -m benchmarks.peers.scheduler [--running 64 256 512] [--rounds 4] [--env DIRECTORY] [--json FILE]

    round 1   weft, vLLM      each measure is taken on one side and then on the other; who goes first
    round 2   vLLM, weft      alternates, and the other side sleeps on its pipe

| measure | weft | vLLM |
|---|---|---|
| decode step | plan + commit + settle | schedule + update_from_output |
| lookup | match, 100,000 cached tokens | get_computed_blocks of hashes that are there |
| lookup, from tokens | the same | hashing the prompt's blocks, then that |
| allocation | open + seal + commit, 8,192 tokens | allocate_slots |

Both have the geometry of one config.json (Qwen3.5's shape: three layers of a gated delta net to one of
attention) and 64 GiB to hand out, prefix caching on. Both are one thread of Python, and times are CPU time of
that thread: what other processes take of a busy machine is not counted. vLLM runs in an environment of its
own (``make_env``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks import step_overhead
from benchmarks.peers.environment import DEFAULT_ENVIRONMENT, Absent, Environment, clean_variables
from benchmarks.prefix_lookup import remember
from benchmarks.serve.checkpoints import config_of
from weft.cli.doctor import cpu_facts
from weft.families import read_spec
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.memory.memory import Memory
from weft.units import SeqId

MEMORY_BYTES = 64 << 30
MAX_MODEL_LEN = 131_072
PREFIX_TOKENS = 100_000
PREFILL_TOKENS = 8192
STATE_EVERY = 4096
"""How far apart the states of the long prefix lie in weft."""


class VllmScheduler:
    """The child that runs ``vllm_scheduler.py``. Use as a context manager."""

    def __init__(self, environment: Environment, model: str, running_max: int) -> None:
        asked = {
            "model": model,
            "max_model_len": MAX_MODEL_LEN,
            "running_max": running_max,
            "step_tokens": PREFILL_TOKENS,
        }
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the child
        self._child = subprocess.Popen(
            [environment.python(), Path(__file__).with_name("vllm_scheduler.py"), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=clean_variables() | environment.vllm_variables(1),
        )
        self.facts: dict[str, Any] = self._read()

    def __enter__(self) -> VllmScheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def ask(self, what: str, **more: int) -> Any:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"what": what, **more}) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            self._log.seek(0)
            told = [text for text in self._log.read().splitlines() if "Error" in text]
            raise Absent(f"vLLM's scheduler ended with code {code}: {' | '.join(told[-2:])}")
        return json.loads(line)


class WeftMemory:
    """The same questions to weft, in this process."""

    def __init__(self, arena: ArenaPlan) -> None:
        self.arena = arena

    def decode(self, running: int, steps: int) -> list[float]:
        taken = step_overhead.measure(
            running, steps, spread=True, cache=True, arena=self.arena, clock=time.thread_time
        )["whole step"]
        return [float(value) for value in taken]

    def prefix(self, tokens: int, repeats: int) -> dict[str, list[float]]:
        memory = Memory(self.arena, cache=True)
        prompt = np.asarray([5 + i * i % 30_011 for i in range(tokens)], dtype=np.int32)
        remember(memory, prompt, STATE_EVERY)
        asked = np.concatenate([prompt, np.asarray([7] * 5, dtype=np.int32)])
        as_list: list[int] = asked.tolist()
        return {
            "lookup": repeated(lambda: memory.match(asked, salt=""), repeats),
            "arrival": repeated(lambda: memory.match(as_list, salt=""), repeats),
            "hit": [memory.match(asked, salt="").cached_tokens / tokens],
        }

    def allocate(self, tokens: int, repeats: int) -> list[float]:
        memory, taken = Memory(self.arena, cache=True), []
        for number in range(repeats):
            prompt = np.asarray([5 + (number * 131 + i * i) % 30_011 for i in range(tokens)], dtype=np.int32)
            match, seq = memory.match(prompt, salt=""), SeqId(number)
            began = time.thread_time()
            transaction = memory.transaction()
            assert transaction.open(seq, match, tokens)
            memory.commit(transaction.seal())
            taken.append((time.thread_time() - began) * 1e6)
            transaction = memory.transaction()
            transaction.close(seq, keep=None)
            memory.commit(transaction.seal())
        return taken


def repeated(what: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each call."""
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        what()
        taken.append((time.thread_time() - began) * 1e6)
    return taken


Rows = dict[str, dict[str, list[float]]]
"""Measure -> side -> the median of each round, in microseconds."""


def in_turn(measures: dict[str, dict[str, Callable[[], float]]], rounds: int, say: Callable[[str], None]) -> Rows:
    """Every measure on both sides, round by round; the first side alternates."""
    rows: Rows = {name: {side: [] for side in sides} for name, sides in measures.items()}
    for number in range(rounds):
        for name, sides in measures.items():
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            for side in order:
                rows[name][side].append(sides[side]())
        say(f"round {number + 1} of {rounds}")
    return rows


def measures_of(
    weft: WeftMemory, vllm: VllmScheduler, running: Sequence[int], steps: int, repeats: int
) -> dict[str, dict[str, Callable[[], float]]]:
    """Each measure as a call for each side, which takes it once and returns a median."""

    def decode(count: int) -> dict[str, Callable[[], float]]:
        return {
            "weft": lambda: median(weft.decode(count, steps)),
            "vllm": lambda: median(vllm.ask("decode", running=count, steps=steps)),
        }

    def prefix(key: str) -> dict[str, Callable[[], float]]:
        return {
            "weft": lambda: median(weft.prefix(PREFIX_TOKENS, repeats)[key]),
            "vllm": lambda: median(vllm.ask("prefix", tokens=PREFIX_TOKENS, repeats=repeats)[key]),
        }

    found = {f"decode step, {count} running": decode(count) for count in running}
    found[f"lookup, {PREFIX_TOKENS:,} cached"] = prefix("lookup")
    found[f"lookup, from tokens, {PREFIX_TOKENS:,} cached"] = prefix("arrival")
    found[f"allocation, {PREFILL_TOKENS:,} tokens"] = {
        "weft": lambda: median(weft.allocate(PREFILL_TOKENS, repeats)),
        "vllm": lambda: median(vllm.ask("allocate", tokens=PREFILL_TOKENS, repeats=repeats)),
    }
    return found


def show(rows: Rows) -> None:
    print(f"{'CPU microseconds, medians':<36}{'weft':>11}{'vLLM':>11}{'ratio':>9}  [least-most of rounds]")
    for name, sides in rows.items():
        weft, vllm = (median(sides[side]) for side in ("weft", "vllm"))
        ratios = [theirs / own for own, theirs in zip(sides["weft"], sides["vllm"], strict=True)]
        print(f"{name:<36}{weft:>11,.1f}{vllm:>11,.1f}{vllm / weft:>9.2f}  [{min(ratios):.2f}-{max(ratios):.2f}]")
    print("ratio above 1: weft takes less")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--env", type=Path, default=DEFAULT_ENVIRONMENT)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="weft-scheduler-") as folder:
        config = config_of("qwen", "350m")
        config.max_position_embeddings = MAX_MODEL_LEN
        config.architectures = ["Qwen3_5ForCausalLM"]
        config.save_pretrained(folder)
        spec = read_spec(json.loads((Path(folder) / "config.json").read_text()))
        try:
            with VllmScheduler(Environment(asked.env), folder, max(asked.running)) as vllm:
                weft = WeftMemory(plan_arena(spec, MEMORY_BYTES))
                measures = measures_of(weft, vllm, asked.running, asked.steps, asked.repeats)
                rows = in_turn(measures, asked.rounds, lambda line: print(line, file=sys.stderr))
                facts = vllm.facts
        except Absent as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    cpu = cpu_facts()
    print(
        f"{cpu['model']}, {cpu['usable_cores']} cores, load {load[0]:.1f} at start and "
        f"{os.getloadavg()[0]:.1f} at the end; vLLM {facts['version']}, groups {facts['groups']}"
    )
    show(rows)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"cpu": cpu, "load_average": load, "vllm": facts, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
