"""Where the time of a prompt goes, by part of a layer: products, recurrences, attention, and what is small.

    python -m benchmarks.prefill_parts [--geometry Qwen3.5-0.8B LFM2-350M granite-4.0-h-350m] [--layers 8]
                                       [--tokens 512] [--top 12] [--json FILE]

A random bfloat16 model of a public geometry, cut to ``--layers``, computes a prompt on one thread. Python's
profiler counts the thread's own time (so other load does not count) by the function that spent it: each op
and each call into the kernels is one. Shown per token of the prompt, with the share of the whole.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.start import write_checkpoint
from weft.api import Engine
from weft.host import cpu_name_and_flags
from weft.planning.geometries import find_geometry
from weft.tensor import native

GEOMETRIES = ("Qwen3.5-0.8B", "LFM2-350M", "granite-4.0-h-350m")


def part_of(file: str, function: str) -> str:
    """``ops/norm.py`` -> the name of the file; the function's own name elsewhere."""
    path = Path(file)
    if "ops" in path.parts:
        return f"op {path.stem}"
    if "weft" in path.parts:
        return f"{path.parent.name}/{path.name} {function}"
    return function if file == "~" else f"{path.name} {function}"


def measure(config: dict[str, Any], tokens: int) -> Counter[str]:
    """Seconds by part, of the second of two prompts."""
    with tempfile.TemporaryDirectory(prefix="weft-parts-") as directory:
        write_checkpoint(Path(directory), config)
        with Engine(
            directory, dtype="bfloat16", memory="512MB", max_model_len=2 * tokens + 64, threads=1, prefix_cache=False
        ) as engine:
            profile = cProfile.Profile(time.thread_time)
            for number in range(2):
                prompt = [(7 * at + number) % 1000 + 3 for at in range(tokens)]
                if number:
                    profile.enable()
                engine.generate([prompt], progress=False, max_tokens=1, temperature=0.0)
            profile.disable()
    parts: Counter[str] = Counter()
    for (file, _, function), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():  # type: ignore
        parts[part_of(file, function)] += own_s
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = {}
    for name in args.geometry:
        geometry = find_geometry(name)
        if geometry is None:
            parser.error(f"--geometry {name} is not in weft's table of models")
        config = dict(geometry.config)
        if config["num_hidden_layers"] > args.layers:
            for kinds in ("layer_types", "layers_block_type"):
                if kinds in config:
                    config[kinds] = config[kinds][: args.layers]
            config["num_hidden_layers"] = args.layers
        parts = measure(config, args.tokens)
        whole = sum(parts.values())
        table[name] = dict(parts.most_common(args.top))
        print(
            f"{cpu_name_and_flags()[0]}, {native.describe()}; {name}, {args.layers} layers, "
            f"{args.tokens} tokens: {whole / args.tokens * 1e6:.0f} us a token"
        )
        for part, seconds in parts.most_common(args.top):
            print(f"{seconds / args.tokens * 1e6:>10.1f} us {seconds / whole:>7.1%}  {part}")
    if args.json is not None:
        args.json.write_text(json.dumps({"processor": cpu_name_and_flags()[0], "parts": table}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
