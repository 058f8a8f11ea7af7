"""Where a simulated store loses prompt tokens that it could have had, by what became of their snapshot.

    python benchmarks/store_losses.py TRACE [--limit 4000] [--store 1TB@3GB/s]

It plays the trace as `weft simulate --store` does, and follows each snapshot that was computed:

    computed --> put --> evicted         the last event of the deepest snapshot of a prompt, when the prompt
                                         arrives and less than that is cached

    computed    never put: it left memory before its turn, or was not worth writing
    put         in the store or on the way there: reading it was too dear or too late
    evicted     gone from the store

What is left to the hit rate without a limit had no snapshot. It takes twice the time of the simulation.
Sizes and costs are those of Qwen3.5-397B-A17B on eight H100 with 20 GB each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from weft.cli.main import main as weft
from weft.memory.prefix_store import NewSnapshot
from weft.memory.values import NodeId
from weft.schedule.plan import StepPlan
from weft.schedule.store_writes import StoreWrites
from weft.store import eviction
from weft_tools.sim import store_tier
from weft_tools.sim.recording import SAMPLE
from weft_tools.sim.replay import Player
from weft_tools.sim.store_tier import VirtualStore

Tokens = npt.NDArray[np.int32]


class Followed:
    """Snapshots by number; ``lost[event]``: (tokens, seconds since the snapshot was computed)."""

    def __init__(self) -> None:
        self.tokens: list[Tokens] = []
        self.computed_s: list[float] = []
        self.event: list[str] = []
        self.lost: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._numbers: dict[int, int] = {}
        self._of_record: dict[int, int] = {}
        self._probes = np.zeros((3, 0), np.int64)
        """By snapshot: its position, its last token, and one in its middle."""

    def computed(self, tokens: Tokens, now_s: float) -> None:
        if self._numbers.setdefault(hash(tokens.tobytes()), len(self.tokens)) == len(self.tokens):
            self.tokens.append(tokens.copy())
            self.computed_s.append(now_s)
            self.event.append("computed")

    def put(self, tokens: Tokens, record: int) -> None:
        number = self._numbers.get(hash(tokens.tobytes()))
        if number is not None:
            self.event[number], self._of_record[record] = "put", number

    def evicted(self, record: int) -> None:
        if record in self._of_record:
            self.event[self._of_record[record]] = "evicted"

    def admitted(self, prompt: Tokens, cached: int, now_s: float) -> None:
        new = self.tokens[self._probes.shape[1] :]
        more = [[len(one), int(one[-1]), int(one[len(one) // 2])] for one in new]
        self._probes = np.concatenate([self._probes, np.asarray(more, np.int64).reshape(-1, 3).T], axis=1)
        position, last, middle = self._probes
        may = np.flatnonzero((position < len(prompt)) & (position > cached))
        may = may[(prompt[position[may] - 1] == last[may]) & (prompt[position[may] // 2] == middle[may])]
        for number in may[np.argsort(-position[may])].tolist():
            if np.array_equal(prompt[: len(self.tokens[number])], self.tokens[number]):
                self.lost[self.event[number]].append(
                    (len(self.tokens[number]) - cached, now_s - self.computed_s[number])
                )
                return


def watched(followed: Followed) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What replaces the functions of the simulation: each calls the one that it replaces."""
    add, put, evict, began = (StoreWrites.add, VirtualStore.put, eviction.evict, Player._note_began)

    def added(writes: StoreWrites, node: NodeId) -> None:
        contents = writes._memory.snapshot_contents(node)
        if contents is not None:
            followed.computed(np.asarray(contents.tokens, np.int32)[: contents.position], writes._clock())
        add(writes, node)

    def was_put(store: VirtualStore, snapshot: NewSnapshot) -> Any:
        ticket = put(store, snapshot)
        if ticket is not None:
            followed.put(np.frombuffer(snapshot.tokens, np.int32), store._number)
        return ticket

    def was_evicted(*asked: Any) -> Any:
        removed = evict(*asked)
        for number, *_ in removed:
            followed.evicted(number)
        return removed

    def admitted(player: Player, plan: StepPlan) -> None:
        for run, one in enumerate(plan.admissions, start=plan.run_count - len(plan.admissions)):
            if np.isnan(player._times.began[one.seq]):
                followed.admitted(np.asarray(one.tokens), int(plan.starts[run]), player.clock())
        began(player, plan)

    return [
        (StoreWrites, "add", added),
        (VirtualStore, "put", was_put),
        (store_tier, "evict", was_evicted),
        (Player, "_note_began", admitted),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", default=SAMPLE)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--store", default="1TB@3GB/s")
    args = parser.parse_args()
    followed, written = Followed(), io.StringIO()
    for owner, name, function in watched(followed):
        mock.patch.object(owner, name, function).start()
    with contextlib.redirect_stdout(written):
        weft(
            [
                "simulate",
                args.trace,
                "--limit",
                str(args.limit),
                "--model",
                "Qwen3.5-397B-A17B",
                "--tp",
                "8",
                "--quantize",
                "fp8",
                "--no-oracle",
                "--memory",
                "20GB",
                "--store",
                args.store,
                "--store-write",
                "24GB/s",
                "--policy",
                "value",
                "--json",
            ]
        )
    report = json.loads(written.getvalue())
    prompts, row = report["prompt_tokens"], report["results"][0]
    total, limit = row["cached_tokens"] / prompts, report["infinite"]["pages"]
    print(f"{'hits':10s} {100 * total:5.2f} %")
    for event, lost in sorted(followed.lost.items()):
        tokens, ages_s = np.asarray([one[0] for one in lost]), [one[1] for one in lost]
        total += tokens.sum() / prompts
        print(
            f"{event:10s} {100 * tokens.sum() / prompts:5.2f} %  {len(lost)} requests, "
            f"half of them after {np.median(ages_s):.0f} s"
        )
    print(f"{'none':10s} {100 * (limit - total):5.2f} %  no snapshot; {100 * limit:.2f} % without a limit")


if __name__ == "__main__":
    main()
