"""What a lookup in the prefix cache costs: a long cached prefix, in few edges and in many, in a wide tree.

    python benchmarks/prefix_lookup.py [--tokens 100000] [--repeats 200]

Microseconds, median and 99th percentile. The target is below 200 for 100,000 cached tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from tests.support.workload import small_arena
from weft.memory.memory import Memory
from weft.units import PAGE_TOKENS, SeqId

VOCAB_SIZE = 32_000


def remember(memory: Memory, tokens: np.ndarray, every: int) -> None:
    """One sequence computes ``tokens``, keeps its state every ``every`` tokens, and ends."""
    seq = SeqId(0)
    transaction = memory.transaction()
    assert transaction.open(seq, memory.match(tokens, salt=""), len(tokens))
    for position in range(every, len(tokens), every):
        transaction.save(seq, position)
    memory.commit(transaction.seal())
    transaction = memory.transaction()
    transaction.close(seq, keep=tokens)
    memory.commit(transaction.seal())


def microseconds(what: Callable[[], object], repeats: int) -> tuple[float, float]:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        what()
        taken.append((time.perf_counter() - began) * 1e6)
    return float(np.median(taken)), float(np.percentile(taken, 99))


def measure(name: str, tokens: np.ndarray, every: int, branches: int, repeats: int) -> None:
    pages = len(tokens) // PAGE_TOKENS + 64 * (branches + 2)
    slots = len(tokens) // every + branches + 16
    frame_count = pages // 5 + slots // 12 + 64
    memory = Memory(small_arena(pages_per_frame=5, slots_per_frame=12, frame_count=frame_count), cache=True)
    generator = np.random.default_rng(0)
    remember(memory, tokens, every)
    for _ in range(branches):
        front = tokens[: generator.integers(0, len(tokens)) // every * every]
        own = generator.integers(0, VOCAB_SIZE, 40, dtype=np.int32)
        remember(memory, np.concatenate([front, own]), every)
    again = np.concatenate([tokens, tokens[:5]])
    match = memory.match(again, salt="")
    assert match.cached_tokens == len(tokens), match
    median, worst = microseconds(lambda: memory.match(again, salt=""), repeats)
    nodes = memory.usage().cache_nodes

    def open_on_it() -> None:
        transaction = memory.transaction()
        assert transaction.open(SeqId(1), memory.match(again, salt=""), len(again))
        transaction.seal()

    opened, opened_worst = microseconds(open_on_it, repeats)
    miss, _ = microseconds(lambda: memory.match(again[1:], salt=""), repeats)
    print(
        f"{name:<34} {nodes:>6} nodes   match {median:7.1f} us (p99 {worst:7.1f})   match + open + seal "
        f"{opened:7.1f} (p99 {opened_worst:7.1f})   miss {miss:6.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    asked = parser.parse_args()
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, asked.tokens, dtype=np.int32)
    print(f"{asked.tokens:,} cached tokens")
    measure("one edge", tokens, asked.tokens, 0, asked.repeats)
    measure("a snapshot every 4096", tokens, 4096, 0, asked.repeats)
    measure("every 512", tokens, 512, 0, asked.repeats)
    measure("every 512, 1000 branches", tokens, 512, 1000, asked.repeats)
    measure("every 64", tokens, 64, 0, asked.repeats)


if __name__ == "__main__":
    main()
