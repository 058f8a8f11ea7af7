"""Mixture of experts in rows, in tiles and in 12 bits, in one process.

    python -m benchmarks.experts [--tokens 1 8 32 512] [--experts 64] [--rounds 5] [--threads N] [--busy]

    rows         plain matrices [experts, rows, columns], as before tiles: the C++ kernel for few rows of each
                 expert, a loop over experts with torch's products for many
    tiled        bfloat16 tiles, one job for all experts
    twelve_bit   the same in 12 bits a weight

One layer of Qwen3.5-35B-A3B's sizes (hidden 2,048, width 512, 8 experts a token), cut to ``--experts``.
Tokens choose at random. Forms take turns within a round; shown are medians, and times as fast as ``rows``.
GB/s: the weights of the chosen experts over the time of a step.
``--busy``: one thread and its own time, for a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from weft.host import cpu_name_and_flags, usable_cores
from weft.tensor import native
from weft.tensor.ops.moe import ExpertWeights, moe
from weft.tensor.weights.tiles import ExpertTiles, in_best_tiles, tiled

HIDDEN, WIDTH, CHOICES = 2048, 512, 8


def forms_of(experts: int) -> dict[str, tuple[ExpertWeights, ExpertWeights]]:
    values = [
        (torch.randn(experts, rows, columns) * 0.02).bfloat16()
        for rows, columns in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]
    forms: dict[str, tuple[ExpertWeights, ExpertWeights]] = {"rows": (values[0], values[1])}
    for name, in_tiles in (("tiled", tiled), ("twelve_bit", in_best_tiles)):
        pair = [[tiles for one in value if (tiles := in_tiles(one)) is not None] for value in values]
        if all(pair):
            forms[name] = ExpertTiles.of(pair[0]), ExpertTiles.of(pair[1])
    return forms


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    args = parser.parse_args(argv)
    threads = 1 if args.busy else args.threads
    torch.set_num_threads(threads)
    native.set_threads(threads)
    torch.manual_seed(0)
    facts = {
        "processor": cpu_name_and_flags()[0],
        "threads": threads,
        "kernels": native.describe(),
        "torch": torch.__version__,
        "rounds": args.rounds,
        "experts": args.experts,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    clock = time.thread_time if args.busy else time.perf_counter
    table = []
    with torch.inference_mode():
        forms = forms_of(args.experts)
        others = [name for name in forms if name != "rows"]
        print(f"{'tokens':>8}{'rows ms':>10}" + "".join(f"{name:>12}" for name in others) + f"{'GB/s':>8}")
        for tokens in args.tokens:
            x, weights = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, CHOICES)
            samples: dict[str, list[float]] = {name: [] for name in forms}
            for number in range(args.rounds + 1):
                ids = torch.rand(tokens, args.experts).topk(CHOICES).indices
                for name, pair in forms.items():
                    began = clock()
                    moe(x, ids, weights, *pair)
                    if number:
                        samples[name].append(clock() - began)
            seconds = {name: median(times) for name, times in samples.items()}
            chosen = len(set(ids.flatten().tolist()))
            best = min(seconds.values())
            rate = chosen * 3 * WIDTH * HIDDEN * 2 / best / 1e9
            table.append({"tokens": tokens, "seconds": seconds, "bfloat16_gb_s_of_the_fastest": rate})
            print(
                f"{tokens:>8}{seconds['rows'] * 1e3:>10.2f}"
                + "".join(f"{seconds['rows'] / seconds[name]:>12.2f}" for name in others)
                + f"{rate:>8.1f}",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps({"facts": facts, "results": table}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
