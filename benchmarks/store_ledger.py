"""A ledger of many snapshots: seconds until it is ready, and host memory of each.

    python -m benchmarks.store_ledger --snapshots 100000

Rows are written as a store writes them, with real hashes; payloads lie in one sparse volume and are not read.
Each snapshot has ``--records`` KV records of 256 tokens of its own. "Ready" is from the open of the
directory to the first match. Memory is the growth of the resident set over the load.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from weft.store.directory_store import DirectoryStore
from weft.store.disk import OsDisk
from weft.store.identity import NamespaceIdentity
from weft.store.ledger import (
    KV,
    SNAPSHOT,
    chain_of,
    create_ledger,
    generations,
    head_of,
    remove_other_generations,
    root_chain,
    row_of,
)
from weft.store.opening import StoreOptions, open_directory
from weft.store.space import VOLUMES_FOLDER, Volumes

IDENTITY = NamespaceIdentity("ledger", "0" * 64, {}, {}, "bfloat16", "float32", "none", "native", 4096, 4096)
RECORD_TOKENS = 256
BLOCK = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=100_000)
    parser.add_argument("--records", type=int, default=2, help="KV records of each snapshot")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds, cpu, nbytes = measure(Path(folder) / "store", arguments.snapshots, arguments.records)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps(
                {
                    "snapshots": arguments.snapshots,
                    "records": arguments.records,
                    "ready_s": seconds,
                    "ready_cpu_s": cpu,
                    "host_bytes_each": nbytes,
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
    print(
        f"{arguments.snapshots:,} snapshots with {arguments.records} KV records each: ready in "
        f"{seconds:.2f} s ({cpu:.2f} s of a core), {nbytes:.0f} bytes of host memory each"
    )


def measure(path: Path, snapshots: int, records: int) -> tuple[float, float, float]:
    """(seconds until the first match, seconds of one core, bytes of host memory for each snapshot)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # this process has used no memory before
        tokens = pool.apply(_fill, (path, snapshots, records))
    gc.collect()
    process = psutil.Process()
    before, began, cpu = process.memory_info().rss, time.perf_counter(), time.process_time()
    store = DirectoryStore(
        open_directory(path, OsDisk()), IDENTITY, StoreOptions(capacity_bytes=1 << 30, reserve_bytes=0)
    )
    prefix = store.match(None, tokens, 0)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    assert prefix is not None
    assert prefix.position == records * RECORD_TOKENS
    gc.collect()
    after = process.memory_info().rss
    assert store.stats().snapshots == snapshots
    store.close()
    return seconds, cpu, (after - before) / snapshots


def _fill(path: Path, snapshots: int, records: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Writes the store; returns the tokens of the last snapshot."""
    disk = OsDisk()
    open_directory(path, disk).close()
    rng = np.random.default_rng(0)
    namespace = IDENTITY.digest
    root = root_chain(namespace, bytes(16))
    rows: list[bytes] = []
    pieces: list[bytes] = []
    number = block = 0
    tokens = np.zeros(0, dtype=np.uint32)
    for _ in range(snapshots):
        tokens = rng.integers(0, 1 << 31, records * RECORD_TOKENS, dtype=np.uint32)
        content = tokens.tobytes()
        chain, parent = root, 0
        plain = {"namespace": namespace, "salt": bytes(16), "payload_bytes": BLOCK, "seconds": 1.0}
        for record in range(records):
            piece = content[record * RECORD_TOKENS * 4 : (record + 1) * RECORD_TOKENS * 4]
            number, block = number + 1, block + 1
            head, chain = head_of(chain, piece), chain_of(chain, piece)
            rows.append(
                row_of(
                    kind=KV,
                    number=number,
                    parent=parent,
                    position=record * RECORD_TOKENS,
                    tokens=RECORD_TOKENS,
                    offset=block * BLOCK,
                    head=head,
                    chain=chain,
                    tokens_at=len(pieces) * RECORD_TOKENS * 4,
                    **plain,
                )
            )
            pieces.append(piece)
            parent = number
        number, block = number + 1, block + 1
        rows.append(
            row_of(
                kind=SNAPSHOT,
                number=number,
                parent=parent,
                offset=block * BLOCK,
                chain=chain,
                position=records * RECORD_TOKENS,
                **plain,
            )
        )
    volumes = Volumes(_SparseDisk(), path / VOLUMES_FOLDER, True)
    volumes.create(0, block + 1)
    volumes.close()
    generation = max(generations(path, disk)) + 1
    create_ledger(path, disk, generation, b"".join(rows), pieces)
    remove_other_generations(path, disk, generation)
    return tokens


class _SparseDisk(OsDisk):
    """Volumes without blocks on the disk: nothing is read of them."""

    def preallocate(self, handle: int, size: int) -> None:
        self.truncate(handle, size)


if __name__ == "__main__":
    main()
