"""A store in files against a store of objects in the same directory, as obstore reads and writes them.

    python -m benchmarks.store_objects [--rounds 15] [--json FILE]

    read    records of a volume by ``preadv`` into the buffer of a fetch, and ranges of an object, copied into it
    row     an append to the ledger and its sync, and a new object with a sync of itself and of its directory
    start   the ledger of 100,000 rows as one file, and as objects of 100 rows each

Both sides take turns in one process, in alternating order, and each figure is the median of the rounds. Files are in
the page cache: a disk that is slower than obstore hides a part of the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import obstore
from obstore.store import LocalStore

VOLUME_BYTES = 256 << 20
READ_BYTES = 96 << 20
"""Bytes of a round of reads, of any record size."""
RECORDS = {"3 MiB": 3 << 20, "256 KiB": 256 << 10, "32 KiB": 32 << 10}
ROW_BYTES = 144
ROWS = 100_000
ROWS_PER_OBJECT = 100
APPENDS = 50
Side = Callable[[], object]


def seconds(side: Side) -> float:
    began = time.perf_counter()
    side()
    return time.perf_counter() - began


def medians(files: Side, objects: Side, rounds: int) -> tuple[float, float]:
    """Return the median seconds of both sides, which take turns in alternating order."""
    times: dict[str, list[float]] = {"files": [], "objects": []}
    sides = {"files": files, "objects": objects}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            times[name].append(seconds(sides[name]))
    return statistics.median(times["files"][1:]), statistics.median(times["objects"][1:])


def reads(root: Path, size: int) -> tuple[Side, Side]:
    chance = Random(size)
    places = [chance.randrange((VOLUME_BYTES - size) // 4096) * 4096 for _ in range(READ_BYTES // size)]
    buffer = np.empty(size, np.uint8)
    volume, store = os.open(root / "volume", os.O_RDONLY), LocalStore(root)

    def by_file() -> None:
        for place in places:
            os.preadv(volume, [memoryview(buffer)], place)

    def by_object() -> None:
        for place in places:
            buffer[:] = np.frombuffer(
                memoryview(obstore.get_range(store, "volume", start=place, length=size)), np.uint8
            )

    return by_file, by_object


def appends(root: Path) -> tuple[Side, Side]:
    rows = os.open(root / "rows", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    folder = os.open(root, os.O_RDONLY)
    numbers = iter(range(1_000_000))

    def by_file() -> None:
        for _ in range(APPENDS):
            os.write(rows, bytes(ROW_BYTES))
            os.fdatasync(rows)

    def by_object() -> None:
        for _ in range(APPENDS):
            # obstore does not sync, so this is the least that an object on a disk needs.
            segment = os.open(root / f"segment-{next(numbers)}", os.O_WRONLY | os.O_CREAT)
            os.write(segment, bytes(ROW_BYTES))
            os.fdatasync(segment)
            os.close(segment)
            os.fsync(folder)

    return by_file, by_object


def starts(root: Path) -> tuple[Side, Side]:
    (root / "ledger").write_bytes(bytes(ROW_BYTES * ROWS))
    segments = root / "segments"
    segments.mkdir()
    for number in range(ROWS // ROWS_PER_OBJECT):
        (segments / f"{number:08}").write_bytes(bytes(ROW_BYTES * ROWS_PER_OBJECT))
    store = LocalStore(segments)

    def by_file() -> bytes:
        return (root / "ledger").read_bytes()

    def by_object() -> list[bytes]:
        names = sorted(entry["path"] for batch in obstore.list(store) for entry in batch)
        return [bytes(obstore.get(store, name).bytes()) for name in names]

    return by_file, by_object


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = Path(folder)
        (root / "volume").write_bytes(os.urandom(VOLUME_BYTES))
        sides = {f"read {name}": (reads(root, size), READ_BYTES // size) for name, size in RECORDS.items()}
        sides["row"] = appends(root), APPENDS
        sides["start"] = starts(root), 1
        for name, (pair, count) in sides.items():
            files, objects = (1e6 * taken / count for taken in medians(*pair, options.rounds))
            result[name] = {"files_us": files, "objects_us": objects, "files_over_objects": files / objects}
            print(
                f"{name:14} files {files:10.1f} us   objects {objects:10.1f} us   files / objects {files / objects:.2f}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
