"""Embeddings a second: weft's engine and transformers' model, in one process, in turns.

    python -m benchmarks.embeddings [--family lfm2] [--size 350m] [--dtype bfloat16] [--rounds 2] [--json F]

    load      texts x tokens      what it shows
    short     64 x 32             many small inputs, as of queries
    long      8 x 512             chunks of documents
    shared    32 x (224 + 32)     an instruction before each: the prefix cache computes it once

transformers runs its best case: one batch of inputs of one length, so nothing is padded, without a head and
without a cache. Both pool the last token. weft begins each round with an empty cache, and computes each input
so that its bits do not depend on the others. The ratio is of CPU seconds, weft's rate over transformers', so
other work on the machine changes it little; wall seconds stand beside. ``equal`` is the largest difference of
a number.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.serve.checkpoints import FAMILIES, SIZES, Checkpoint, make_checkpoint
from weft.api import Engine
from weft.host import usable_cores

LOADS = {"short": (64, 0, 32), "long": (8, 0, 512), "shared": (32, 224, 32)}
"""Texts, tokens that all of them begin with, tokens of each."""


@dataclass(slots=True)
class Side:
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], np.ndarray]) -> np.ndarray:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        vectors = work()
        self.cpu_s.append(time.process_time() - cpu_s)
        self.wall_s.append(time.perf_counter() - wall_s)
        return vectors


@dataclass(slots=True)
class Row:
    load: str
    texts: int
    weft: Side = field(default_factory=Side)
    transformers: Side = field(default_factory=Side)
    difference: float = 0.0

    def line(self) -> str:
        def rates(side: Side) -> str:
            return (
                f"{self.texts / statistics.median(side.cpu_s):7.1f} a CPU second, "
                f"{self.texts / statistics.median(side.wall_s):6.1f} a second"
            )

        ratio = statistics.median(self.transformers.cpu_s) / statistics.median(self.weft.cpu_s)
        return (
            f"{self.load:7} weft {rates(self.weft)}   transformers {rates(self.transformers)}   "
            f"ratio {ratio:.2f}   equal to {self.difference:.0e}"
        )


def prompts_of(load: str, vocabulary: int) -> list[list[int]]:
    texts, shared, own = LOADS[load]
    dice = random.Random(0)
    front = [dice.randrange(300, vocabulary) for _ in range(shared)]
    return [front + [dice.randrange(300, vocabulary) for _ in range(own)] for _ in range(texts)]


def by_transformers(model: Any, prompts: list[list[int]]) -> np.ndarray:
    with torch.inference_mode():
        hidden = model(torch.tensor(prompts), use_cache=False).last_hidden_state[:, -1].float()
        return torch.nn.functional.normalize(hidden, dim=-1).numpy()


def compare(checkpoint: Checkpoint, rounds: int, threads: int) -> list[Row]:
    torch.set_num_threads(threads)
    dtype = getattr(torch, checkpoint.dtype)
    model = transformers.AutoModel.from_pretrained(checkpoint.directory, dtype=dtype)
    rows = [Row(load, LOADS[load][0]) for load in LOADS]
    with Engine(
        str(checkpoint.directory), dtype=checkpoint.dtype, memory="512MB", threads=threads, max_model_len=1024
    ) as engine:
        for warm in (True, *[False] * rounds):
            for row in rows:
                prompts = prompts_of(row.load, checkpoint.vocab_size)
                prompts = prompts[:4] if warm else prompts
                engine.flush_cache()
                one, other = (Side(), Side()) if warm else (row.weft, row.transformers)
                ours = one.measure(lambda prompts=prompts: engine.embed(prompts, progress=False))
                theirs = other.measure(lambda prompts=prompts: by_transformers(model, prompts))
                row.difference = max(row.difference, float(np.abs(ours - theirs).max()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Embeddings a second beside transformers.")
    parser.add_argument("--family", choices=FAMILIES, default="lfm2")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(args.family, args.size, args.dtype, under=Path(folder))
        rows = compare(checkpoint, args.rounds, args.threads)
    for row in rows:
        print(row.line())
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
