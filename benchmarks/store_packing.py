"""What packing makes of the records of a store: bytes and CPU time, on KV and states that models computed.

    python -m benchmarks.store_packing                     the embedded model, which is trained
    python -m benchmarks.store_packing --model DIR         a checkpoint
    python -m benchmarks.store_packing --random lfm2,qwen3_5 --size small       random weights

Each model reads prompts, and its store is written without packing. Every record is then packed and unpacked
in one thread. The exit code is 1 if a byte differs.

    share     packed bytes over bytes in memory
    GB/s      bytes in memory a second of the CPU time of one thread, the median of the records
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weft.store.ledger import KV, ROW_BYTES, SNAPSHOT, parse_rows
from weft.store.packing import join_parts, pack_part, unpack


def records(store: Path) -> Iterator[tuple[str, bytes]]:
    """(kind, payload) of each record of a store that no process uses."""
    rows, valid = parse_rows(next(store.glob("ledger-*.rows")).read_bytes()[ROW_BYTES:])
    for row in rows[valid]:
        if row["kind"] in (KV, SNAPSHOT) and row["payload_bytes"]:
            with (store / "volumes" / f"volume-{int(row['volume']):05d}").open("rb") as volume:
                volume.seek(int(row["offset"]))
                yield "KV" if row["kind"] == KV else "state", volume.read(int(row["payload_bytes"]))


def fill(model: str, store: Path, kv_dtype: str, prompts: int, tokens: int) -> None:
    """``prompts`` prompts of ``tokens`` tokens go through ``model`` into ``store``."""
    import weft

    engine = weft.Engine(
        model or None,
        store=str(store),
        store_pack="off",
        store_write="4GB/s",
        store_size="8GiB",
        store_reserve="1GiB",
        memory="2GiB",
        kv_dtype=kv_dtype,
        device="cpu",
    )
    try:
        words = (Path(__file__).parents[1] / "docs" / "words.md").read_text(encoding="utf-8").split()
        for prompt in range(prompts):
            first = prompt * tokens % len(words)
            engine.generate(" ".join((words[first:] + words)[:tokens]), max_tokens=24)
    finally:
        engine.close()


def measure(store: Path) -> dict[str, tuple[int, float, float, float]]:
    """By kind: records, share, and GB/s of packing and of unpacking. Raises SystemExit if a byte differs."""
    sizes: dict[str, list[tuple[int, int, float, float]]] = defaultdict(list)
    for kind, payload in records(store):
        began_s = time.thread_time()
        content = join_parts(memoryview(payload), [pack_part(memoryview(payload))])
        packed_s = time.thread_time()
        into = np.empty(len(payload), np.uint8)
        unpack(memoryview(content), into.data)
        ended_s = time.thread_time()
        if into.tobytes() != payload:
            raise SystemExit(f"a {kind} record of {len(payload)} bytes came back with other bytes")
        sizes[kind].append((len(payload), min(len(content), len(payload)), packed_s - began_s, ended_s - packed_s))
    return {
        kind: (
            len(each),
            sum(one[1] for one in each) / sum(one[0] for one in each),
            statistics.median(one[0] / one[2] for one in each) / 1e9,
            statistics.median(one[0] / one[3] for one in each) / 1e9,
        )
        for kind, each in sizes.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="a checkpoint; several for several")
    parser.add_argument("--random", default="", help="families of benchmarks/serve, with commas")
    parser.add_argument("--size", default="small", help="of random checkpoints: tiny, small or 350m")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=600, help="words of each prompt")
    args = parser.parse_args(argv)
    print(f"{'model':28s} {'record':6s} {'count':>5s} {'share':>6s} {'pack':>10s} {'unpack':>10s}")
    with tempfile.TemporaryDirectory(prefix="weft-packing-") as under:
        models = {model: model for model in args.model}
        for family in filter(None, args.random.split(",")):
            from benchmarks.serve.checkpoints import make_checkpoint

            written = make_checkpoint(family, args.size, "bfloat16", under=Path(under) / family)
            models[f"{family} {args.size}, random"] = str(written.directory)
        for number, (model, name) in enumerate((models or {"embedded": ""}).items()):
            directory = Path(under) / str(number)
            fill(name, directory, args.kv_dtype, args.prompts, args.tokens)
            for kind, (count, share, pack, unpacked) in sorted(measure(directory).items()):
                print(
                    f"{model[-28:]:28s} {kind:6s} {count:5d} {share:6.3f} {pack:5.2f} GB/s {unpacked:5.2f} GB/s",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
