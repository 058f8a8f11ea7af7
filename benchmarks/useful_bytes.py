"""How much of the memory that is taken is of use: published geometries, full of sequences, after churn too.

    python benchmarks/useful_bytes.py [--rounds 12] [--lengths 128 512 ...] [--models LFM2 ...]
    python benchmarks/useful_bytes.py --frames 8 16 25 50 100 200 --models 397B
    python benchmarks/useful_bytes.py --cached 1500

The real ``Memory``, no model and no tensors. *Useful* are the exact bytes of the tokens and states of running
sequences. Padding of slots, the rest of each sequence's last page, holes and unused frames all count against
it.

    new        sequences of one length come into an empty arena until no other fits; of the frames they took
    full       then shorter ones, by quarters, down to a page; of the whole arena
    churned    first ``--rounds`` times: sequences of random lengths come until memory is full, and half of
               all leave at random; then as for ``full``; of the whole arena
    stuck      the same with compaction turned off: what lies badly stays, and what does not fit waits
    moved      bytes copied by compaction, as a share of the bytes of all the sequences that came

Where one sequence of that length does not fit the arena there is a dash. With ``--frames``: arenas of so many
frames, ``churned`` and ``stuck`` only, mean and least of six seeds and four lengths. With ``--cached``: this
number of requests goes through a full prefix cache, and half of them continue an earlier one. Printed are the
bytes that compaction copies, as a share of the bytes that had to be computed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import numpy.typing as npt

from weft.memory.frames.plan import plan_arena
from weft.memory.memory import Memory
from weft.memory.transaction import Transaction
from weft.memory.values import Match
from weft.spec import LayerSpec, ModelSpec, StatePart, attention, gated_delta, mamba1, mamba2, short_conv
from weft.units import PAGE_TOKENS, SeqId

LENGTHS = (128, 512, 2048, 8192, 32_768, 131_072, 262_144)
GIB = 2**30
Int32s = npt.NDArray[np.int32]
ADMITTED_AT_ONCE = 64


def model(layers: list[LayerSpec], max_positions: int = 262_144) -> ModelSpec:
    return ModelSpec(
        "row", vocab_size=1, hidden_size=1, max_positions=max_positions, dtype="bfloat16", layers=tuple(layers)
    )


def mamba2_bfloat16(heads: int, head_dim: int, groups: int, state_dim: int, conv_kernel: int) -> LayerSpec:
    """Mamba-2 whose state is kept in the model's dtype."""
    conv, recurrent = mamba2(heads, head_dim, groups, state_dim, conv_kernel).state
    return LayerSpec("mamba2", state=(conv, StatePart(recurrent.name, recurrent.shape, "model")))


MODELS: dict[str, tuple[ModelSpec, int]] = {
    "Qwen3.5-397B-A17B": (model([attention(2, 256)] * 15 + [gated_delta(16, 64, 128, 128, 4)] * 45), 64 * GIB),
    "Qwen3-Next-80B-A3B": (model([attention(2, 256)] * 12 + [gated_delta(16, 32, 128, 128, 4)] * 36), 40 * GIB),
    "Granite-4.0-H-Small": (model([attention(8, 128)] * 4 + [mamba2_bfloat16(128, 64, 1, 128, 4)] * 36), 40 * GIB),
    "Nemotron-H-8B": (model([attention(8, 128)] * 4 + [mamba2(128, 64, 8, 128, 4)] * 24), 40 * GIB),
    "LFM2-1.2B": (model([attention(8, 64)] * 6 + [short_conv(2048, 3)] * 10), 4 * GIB),
    "Jamba-1.5-mini": (model([attention(8, 128)] * 4 + [mamba1(8192, 16, 4)] * 28), 16 * GIB),
}
"""By name: the geometry (KV in bfloat16, one rank), and memory such as is left beside the weights."""


@dataclass(slots=True)
class Filling:
    """Sequences in a memory; ``lengths`` are in tokens, by sequence."""

    spec: ModelSpec
    memory: Memory
    random: Random
    lengths: dict[SeqId, int]
    came_bytes: int = 0
    next_seq: int = 0

    def exact_bytes(self, tokens: int) -> int:
        return tokens * self.spec.kv_bytes_per_token("bfloat16") + self.spec.state_bytes_per_sequence(self.spec.dtype)

    def fill(self, lengths: Iterator[int]) -> None:
        """Open sequences until nothing makes room for the next one."""
        while True:
            transaction = self.memory.transaction()
            opened: dict[SeqId, int] = {}
            waiting = False
            while len(opened) < ADMITTED_AT_ONCE:
                tokens, seq = next(lengths), SeqId(self.next_seq)
                if not transaction.open(seq, Match(version=self.memory.version), tokens):
                    waiting = transaction.reclaim(pages=self.memory.plan.pages_for(tokens), slots=1)
                    break
                opened[seq] = tokens
                self.next_seq += 1
            if not opened and not waiting:
                return
            self.memory.commit(transaction.seal())
            self.lengths |= opened
            self.came_bytes += sum(map(self.exact_bytes, opened.values()))

    def fill_up(self, tokens: int) -> None:
        """With sequences of ``tokens``, and then with shorter ones where no other of them fits."""
        while tokens >= PAGE_TOKENS:
            self.fill(repeat(tokens))
            tokens //= 4

    def leave(self, share: float) -> None:
        leaving = self.random.sample(sorted(self.lengths), int(share * len(self.lengths)))
        transaction = self.memory.transaction()
        for seq in leaving:
            transaction.close(seq)
            del self.lengths[seq]
        self.memory.commit(transaction.seal())

    @property
    def useful_bytes(self) -> int:
        return sum(map(self.exact_bytes, self.lengths.values()))

    @property
    def useful_share(self) -> float:
        """Of the whole arena."""
        return self.useful_bytes / self.memory.plan.arena_bytes

    @property
    def useful_share_of_taken(self) -> float:
        usage = self.memory.usage()
        return self.useful_bytes / (usage.arena_bytes - usage.free_bytes)

    @property
    def moved_share(self) -> float:
        return self.memory.usage().moves.bytes / self.came_bytes


def filling(spec: ModelSpec, memory_bytes: int, seed: int = 0) -> Filling:
    return Filling(spec, Memory(plan_arena(spec, memory_bytes)), Random(seed), {})


def new(spec: ModelSpec, memory_bytes: int, tokens: int) -> Filling:
    full = filling(spec, memory_bytes)
    full.fill(repeat(tokens))
    return full


def churned(spec: ModelSpec, memory_bytes: int, tokens: int, rounds: int, seed: int = 0) -> Filling:
    full = filling(spec, memory_bytes, seed)
    longest = max(tokens, 2048)

    # From a page on, as many short ones as long ones.
    lengths = (int(PAGE_TOKENS * (longest / PAGE_TOKENS) ** full.random.random()) for _ in count())
    for _ in range(rounds):
        full.fill(lengths)
        full.leave(0.5)
    full.fill_up(tokens)
    return full


def stuck(spec: ModelSpec, memory_bytes: int, tokens: int, rounds: int, seed: int = 0) -> Filling:
    """Nothing is cached, so without moving there is nothing that ``reclaim`` could do."""
    with mock.patch.object(Transaction, "reclaim", return_value=False):
        return churned(spec, memory_bytes, tokens, rounds, seed)


def served_from_cache(spec: ModelSpec, memory_bytes: int, requests: int) -> tuple[Memory, float]:
    """``requests`` of 100 to 16,000 tokens, up to 24 at a time, all of whose prefixes are kept while there is
    room. Returns the memory, and the bytes moved as a share of those computed."""
    memory, random = Memory(plan_arena(spec, memory_bytes), cache=True), Random(0)
    draw = np.random.default_rng(0)
    running: dict[SeqId, Int32s] = {}
    ended: list[Int32s] = []
    computed = 0

    def end_one(transaction: Transaction) -> None:
        seq = random.choice(list(running))
        ended.append(running.pop(seq))
        transaction.close(seq, keep=ended[-1])

    for seq in map(SeqId, range(requests)):
        earlier = random.choice(ended[-200:]) if ended and random.random() < 0.5 else np.empty(0, np.int32)
        own = draw.integers(0, 30_000, int(100 * 40 ** random.random()), dtype=np.int32)
        tokens = np.concatenate([earlier, own])[:16_000]
        while True:
            transaction, match = memory.transaction(), memory.match(tokens, salt="")
            opened = transaction.open(seq, match, len(tokens), headroom_pages=len(running))
            missing = memory.plan.pages_for(len(tokens)) - match.cached_tokens // PAGE_TOKENS + len(running)
            helped = opened or transaction.reclaim(pages=missing, slots=1)
            if (opened and len(running) >= 24) or not helped:
                end_one(transaction)
            memory.commit(transaction.seal())
            if opened:
                break
        running[seq] = tokens
        computed += (len(tokens) - match.cached_tokens) * spec.kv_bytes_per_token(
            "bfloat16"
        ) + spec.state_bytes_per_sequence(spec.dtype)
    return memory, memory.usage().moves.bytes / computed


def cost_over_exact(spec: ModelSpec, memory_bytes: int, tokens: int) -> float:
    """By how much what one sequence holds is over its exact bytes, as a share of them."""
    full = filling(spec, memory_bytes)
    transaction, plan = full.memory.transaction(), full.memory.plan
    assert transaction.open(SeqId(0), Match(version=full.memory.version), tokens)
    held = plan.slot_stride_bytes + len(transaction.new_pages(SeqId(0))) * plan.page_bytes
    return held / full.exact_bytes(tokens) - 1


def print_small_arenas(name: str, spec: ModelSpec, frame_bytes: int, frames: list[int], rounds: int) -> None:
    print(
        f"{name}\n  {'frames':>8}"
        + "".join(f" {what:>14}" for what in ("churned mean %", "least %", "stuck mean %", "least %"))
    )
    for frame_count in frames:
        row = []
        for made in (churned, stuck):
            shares = [
                made(spec, frame_count * frame_bytes, tokens, rounds, seed).useful_share
                for tokens in (128, 512, 2048, 4096)
                for seed in range(6)
            ]
            row += [sum(shares) / len(shares), min(shares)]
        print(f"  {frame_count:>8}" + "".join(f" {100 * share:>14.1f}" for share in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--frames", type=int, nargs="+", help="arenas of so many frames, whatever they weigh")
    parser.add_argument("--cached", type=int, metavar="REQUESTS")
    parser.add_argument("--json", type=Path, help="write the shares, from 0 to 1, to this file")
    asked = parser.parse_args()
    report: dict[str, list[dict[str, float]]] = {}
    for name, (spec, memory_bytes) in MODELS.items():
        if not any(part in name for part in asked.models):
            continue
        plan = plan_arena(spec, memory_bytes)
        if asked.cached:
            memory, share = served_from_cache(spec, memory_bytes // 2, asked.cached)
            usage = memory.usage()
            print(
                f"{name:<20} moved {100 * share:5.2f} % of what was computed; {usage.moves}, "
                f"{usage.cache.hit_tokens} tokens found, {usage.cache.evicted_pages} pages evicted"
            )
            continue
        if asked.frames:
            print_small_arenas(name, spec, plan.frame_bytes, asked.frames, asked.rounds)
            continue
        print(
            f"{name}: {memory_bytes / GIB:.1f} GiB, {plan.frame_count} frames of {plan.pages_per_frame} "
            f"pages or {plan.slots_per_frame} slots; 100 tokens cost "
            f"{100 * cost_over_exact(spec, memory_bytes, 100):.2f} % over their exact bytes"
        )
        print(
            f"  {'tokens':>8} {'sequences':>10}"
            + "".join(f" {name + ' %':>10}" for name in ("new", "full", "churned", "stuck", "moved"))
        )
        for tokens in asked.lengths:
            full = new(spec, memory_bytes, tokens)
            if not full.lengths:
                print(f"  {tokens:>8} {'-':>10}")
                continue
            after, before = (made(spec, memory_bytes, tokens, asked.rounds) for made in (churned, stuck))
            sequences, of_taken = len(full.lengths), full.useful_share_of_taken
            full.fill_up(tokens)
            shares = of_taken, full.useful_share, after.useful_share, before.useful_share, after.moved_share
            print(f"  {tokens:>8} {sequences:>10}" + "".join(f" {100 * share:>10.2f}" for share in shares))
            named = zip(("new", "full", "churned", "stuck", "moved"), shares, strict=True)
            report.setdefault(name, []).append({"tokens": tokens, **dict(named)})
    if asked.json is not None:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
