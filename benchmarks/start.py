"""How long a large model takes from its files to ready, and the memory that it takes on the way.

    python -m benchmarks.start [--geometry Qwen/Qwen3.5-4B] [--layers N] [--runs cold cached cache-1 cache-2]
                               [--directory DIR] [--json FILE]

    checkpoint   random bfloat16 weights of a public geometry, in a temporary directory
    cold         the files' pages are dropped from the page cache before
    cached       they are in it
    cache-1      with --weights-cache, which is written     cache-2    with the one that was written

Before them: the seconds that 6 GiB of fresh memory take, first and again, a floor of every start. A virtual
machine may have to ask its host the first time. And what packing takes, a median of 5.

Each start is a process of its own: an engine with 256 MB for KV and states, and one token. Its clock begins
before Python does. ``anon``: private memory (RssAnon), its peak of 50 readings a second, and what stays.
Figures want a quiet machine, memory for the weights twice (page cache and packed), and disk for them two and
a half times. The directory is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import weft
from weft.families import read_architecture
from weft.host import cpu_name_and_flags
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.families import build
from weft.models.reader import TensorCheck
from weft.models.stored_values import TORCH_DTYPES
from weft.planning.geometries import find_geometry
from weft.tensor import native
from weft.tensor.weights import large_pages
from weft.tensor.weights.tiles import gains_by_twelve_bits, rows_of, to_twelve_bit

RUNS = ("cold", "cached", "cache-1", "cache-2")
_FILE_BYTES = 2 << 30
_BLOCK = 1 << 24
"""Random weights that are repeated from changing offsets."""


class _Shapes(TensorCheck):
    """Writes down what a model asks for, instead of checking it."""

    def __init__(self, checkpoint: CheckpointFiles) -> None:
        super().__init__(checkpoint, torch.bfloat16)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, dtype=TORCH_DTYPES["BF16"], device="meta")


@dataclass(frozen=True)
class Start:
    """Seconds and bytes of one start. ``load_s``: the engine's part of ``ready_s``."""

    run: str
    ready_s: float
    load_s: float
    weights_bytes: int
    anonymous_peak_bytes: int
    anonymous_stays_bytes: int
    form: str


def ceilings() -> str:
    """Of this machine: fresh memory on all threads, and packing into 12 bits on one."""
    fresh_s, packing_s = [], []
    for _ in range(2):
        began = time.perf_counter()
        large_pages.empty((6 << 30,), torch.uint8).fill_(1)
        fresh_s.append(time.perf_counter() - began)
        large_pages.close()  # or this process would keep it during the starts
    words = f"6 GiB of fresh memory: {fresh_s[0]:.1f} s, then {fresh_s[1]:.1f} s"
    weight = (torch.randn(4096, 2560, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    if not gains_by_twelve_bits(weight.device, weight.dtype, *weight.shape):
        return words
    threads = native.extension().threads()
    native.extension().set_threads(1)
    for _ in range(5):
        began = time.perf_counter()
        to_twelve_bit((rows_of(weight),))
        packing_s.append(time.perf_counter() - began)
    native.extension().set_threads(threads)
    return f"{words}; packing: {median(packing_s) / weight.numel() * 1e9:.1f} ns a weight on one thread"


def _file_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def write_checkpoint(directory: Path, config: dict[str, Any]) -> int:
    """Returns the bytes of the weights."""
    source = CheckpointFiles(directory, config, {}, "model.", directory / "config.json")
    architecture = read_architecture(config)
    shapes = _Shapes(source)
    build(architecture, shapes)
    embedded = Path(weft.__file__).parent / "embedded" / "weft-recall"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, directory)
    (directory / "config.json").write_text(json.dumps(config))
    block = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    numbers = block.view(torch.int16).numpy()
    whole, names, held = 0, list(shapes.shapes), 0
    files: list[list[str]] = [[]]
    for name in names:
        size = 2 * int(np.prod(shapes.shapes[name], dtype=np.int64))
        if held + size > _FILE_BYTES and files[-1]:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
        whole += size
    for number, part in enumerate(files):
        header, begin = {"__metadata__": {"format": "pt"}}, 0  # transformers reads nothing without it
        for name in part:
            size = 2 * int(np.prod(shapes.shapes[name], dtype=np.int64))
            header[name] = {"dtype": "BF16", "shape": shapes.shapes[name], "data_offsets": [begin, begin + size]}
            begin += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / _file_name(number)).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for at, name in enumerate(part):
                left, offset = int(np.prod(shapes.shapes[name], dtype=np.int64)), at * 7919 % 65536
                while left:
                    piece = numbers[offset : offset + left]
                    file.write(memoryview(piece).cast("B"))
                    left, offset = left - len(piece), 0
            file.flush()
            os.fsync(file.fileno())
    places = {name: _file_name(number) for number, part in enumerate(files) for name in part}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": whole}, "weight_map": places})
    )
    return whole


def start(run: str, directory: Path, cache: Path) -> Start:
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as opened:
            if run == "cold":
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(1 << 24):
                    pass
    argv = [sys.executable, "-m", "benchmarks.start_child", str(directory), str(time.time())]
    done = subprocess.run(
        [*argv, *([str(cache)] if run.startswith("cache-") else [])], check=True, capture_output=True, text=True
    )
    return Start(run, **json.loads(done.stdout.splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="Qwen/Qwen3.5-4B")
    parser.add_argument("--layers", type=int, help="of the geometry's, from the first; default: all")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--directory", type=Path, help="where the temporary directory is made")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    geometry = find_geometry(args.geometry)
    if geometry is None:
        parser.error(f"--geometry {args.geometry} is not in weft's table of models")
    print(ceilings(), flush=True)
    config = dict(geometry.config)
    if args.layers:
        config["num_hidden_layers"] = args.layers
        config.pop("layer_types", None)
    starts = []
    with tempfile.TemporaryDirectory(prefix="weft-start-", dir=args.directory) as temporary:
        directory, cache = Path(temporary) / "model", Path(temporary) / "cache"
        directory.mkdir()
        whole = write_checkpoint(directory, config)
        print(
            f"{cpu_name_and_flags()[0]}; {args.geometry}, {config['num_hidden_layers']} layers: "
            f"{whole / 1e9:.1f} GB of bfloat16",
            flush=True,
        )
        print(f"{'run':>8}{'ready s':>9}{'load s':>8}{'weights GB':>12}{'anon peak':>11}{'stays':>8}{'peak/stays':>12}")
        for run in args.runs:
            one = start(run, directory, cache)
            starts.append(one)
            print(
                f"{run:>8}{one.ready_s:>9.1f}{one.load_s:>8.1f}{one.weights_bytes / 1e9:>12.2f}"
                f"{one.anonymous_peak_bytes / 1e9:>11.2f}{one.anonymous_stays_bytes / 1e9:>8.2f}"
                f"{one.anonymous_peak_bytes / one.anonymous_stays_bytes:>12.2f}  {one.form}",
                flush=True,
            )
    if args.json is not None:
        facts = {"processor": cpu_name_and_flags()[0], "geometry": args.geometry, "layers": config["num_hidden_layers"]}
        table = [asdict(one) for one in starts]
        args.json.write_text(json.dumps({"facts": facts, "starts": table}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
