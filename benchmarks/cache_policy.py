"""Cache policies side by side at equal bytes: hit rates by trace, memory and policy, and what the policy
costs.

    python benchmarks/cache_policy.py [TRACE] [--start 0] [--limit 4000] [--memory 20GB,40GB,80GB,160GB]
        [--policy value,lru,marconi,every:2048,prompt] [--only documents,conversation] [--no-oracle]
        [--json FILE]

TRACE is a file that `weft simulate` reads, or `sample`, which comes with weft. From it and from seeds:

    conversation   --limit requests from --start on
    later          the requests behind those
    one-shots      half of the first, with a tenth as many long prompts that nobody asks again
    scans          half of the first, with bursts of prompts that share an instruction and nothing else
    documents      shared documents that branch, made up
    other documents   the same with another seed, and twice as many that live half as long

Qwen3.5-397B-A17B at TP8, FP8 weights on eight H200: 15,360 B of KV a token and 24.01 MB of state a sequence
on each. `saved` are the seconds that the cached tokens would have taken. Cost is the time inside the policy,
by request. A FILE that is there keeps its rows of other traces, policies and sizes, so that a long run can be
done in parts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from tests.support.synthetic import Library, document_traffic, with_one_shots, with_scans
from weft.costs.step import CostModel
from weft.memory.frames.plan import ArenaPlan, plan_arena
from weft.memory.memory import Memory
from weft.memory.prefix.value.policy import ValuePolicy
from weft.planning.geometries import find_geometry
from weft.planning.model_plan import PlanOptions, make_plan
from weft.planning.roofline import model_load, roofline
from weft.units import PAGE_TOKENS, parse_bytes
from weft_tools.sim.arms import Arm, find_arm
from weft_tools.sim.oracle import Hindsight
from weft_tools.sim.recording import SAMPLE, read_trace
from weft_tools.sim.report import Report
from weft_tools.sim.study import run_study
from weft_tools.sim.traffic import Traffic

MODEL, TP, DEVICE = "Qwen3.5-397B-A17B", 8, "H200"
POLICIES = "value,lru,marconi,every:2048,prompt"
SIZES = "20GB,40GB,80GB,160GB"
HOOKS = ("recall", "opened", "published", "kept", "again", "evicted", "left", "narrowed", "committed", "order")


def traffics(trace: str, limit: int, start: int = 0) -> Iterator[tuple[str, Callable[[], Traffic]]]:
    """Names, and how to make what they stand for."""

    def part(first: int, count: int | None) -> Traffic:
        whole, _ = read_trace(trace)
        end = len(whole) if count is None else min(len(whole), first + count)
        began_s = whole.requests[start].at_s if start else 0.0
        kept = [
            replace(
                one,
                at_s=one.at_s - began_s,
                next_turn=one.next_turn - first if one.next_turn is not None and one.next_turn < end else None,
            )
            for one in whole.requests[first:end]
        ]
        return Traffic(kept, block_tokens=whole.block_tokens, fronts=whole.fronts, block_count=whole.block_count)

    yield "conversation", lambda: part(start, limit)
    if len(read_trace(trace)[0]) > start + limit:
        yield "later", lambda: part(start + limit, None)
    yield "one-shots", lambda: with_one_shots(part(start, limit // 2), 2)
    yield "scans", lambda: with_scans(part(start, limit // 2), 3)
    yield "documents", lambda: document_traffic(1, limit)
    yield "other documents", lambda: document_traffic(7, limit, Library(documents=120, lifetime_s=300.0))


def hardware(sizes: list[int]) -> tuple[list[ArenaPlan], CostModel]:
    geometry = find_geometry(MODEL)
    assert geometry is not None
    options = PlanOptions(arena_bytes=max(sizes), tp=TP, quantize="fp8")
    plan = make_plan(geometry.name, geometry.config, options)
    load = model_load(
        plan.architecture,
        parameters=plan.weights.parameters,
        eight_bit=True,
        weight_bytes=1.0,
        kv_bytes=plan.kv_token_bytes * TP,
        state_bytes=plan.state_bytes * TP,
    )
    return [plan_arena(plan.spec, size, compress=True) for size in sizes], roofline(load, DEVICE, count=TP)


_READS = 20_000


class Stopwatch:
    """Seconds inside the policies that memories made by ``timed`` arms have, without those of reading the
    clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        began = time.thread_time()
        for _ in range(_READS):
            time.thread_time()
        self._read_s = (time.thread_time() - began) / _READS

    def timed(self, arm: Arm) -> Arm:
        def make(plan: ArenaPlan, cost: CostModel, clock: Callable[[], float]) -> Memory:
            memory = arm.make_memory(plan, cost, clock)
            policy: Any = memory._state.cache.policy  # a benchmark may look inside
            if isinstance(policy, ValuePolicy):
                for name in HOOKS:
                    setattr(policy, name, self._around(getattr(policy, name)))
            return memory

        return replace(arm, make_memory=make)

    def _around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def timed(*args: Any, **more: Any) -> Any:
            began = time.thread_time()
            found = hook(*args, **more)
            self.seconds += time.thread_time() - began - self._read_s
            return self._each(found) if isinstance(found, Iterator) else found

        return timed

    def _each(self, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.thread_time()
            item = next(items, None)
            self.seconds += time.thread_time() - began - self._read_s
            if item is None:
                return
            yield item


def merged(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The results of one trace: those of ``now``, and those of ``before`` that it has not, where both are of
    the same requests. By policy, then by size."""
    if before is None or any(before[key] != now[key] for key in ("requests", "prompt_tokens")):
        return now
    rows = {(row["arm"], row["memory_bytes"]): row for row in (*before["results"], *now["results"])}
    order: dict[str, int] = {}
    for arm, _ in rows:
        order.setdefault(arm, len(order))
    kept = sorted(rows.values(), key=lambda row: (order[row["arm"]], row["memory_bytes"]))
    return {**now, "oracle": now["oracle"] or before["oracle"], "results": kept}


def _cell(found: Report | Hindsight) -> str:
    return f"{found.hit_rate:>9.1%}{found.saved_s:>8,.0f}s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", nargs="?", default=SAMPLE)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--memory", default=SIZES)
    parser.add_argument("--policy", default=POLICIES)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-oracle", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    sizes = [parse_bytes(text, flag="--memory") for text in asked.memory.split(",")]
    plans, cost = hardware(sizes)
    wanted = {name for name in asked.only.split(",") if name}
    results: dict[str, Any] = {}
    if asked.json is not None and asked.json.exists():
        results = json.loads(asked.json.read_text(encoding="utf-8"))
    for name, make in traffics(asked.trace, asked.limit, asked.start):
        if wanted and name not in wanted:
            continue
        traffic, watch = make(), Stopwatch()
        arms = [find_arm(policy) for policy in asked.policy.split(",")]
        study = run_study(
            traffic, plans, cost, [watch.timed(arm) for arm in arms], asked_bytes=sizes, oracle=not asked.no_oracle
        )
        results[name] = merged(results.get(name), study.to_json())
        print(
            f"\n{name}: {study.requests:,} requests, {study.prompt_tokens:,} prompt tokens, "
            f"infinite cache {study.bound.state_rate:.1%}"
        )
        print(f"{'hit rate, saved':20}" + "".join(f"{text:>18}" for text in asked.memory.split(",")))
        for at, arm in enumerate(arms):
            cells = [size.reports[at] for size in study.sizes]
            print(f"{arm.name:20}" + "".join(map(_cell, cells)))
        if not asked.no_oracle:
            print(f"{'oracle':20}" + "".join(_cell(size.oracle) for size in study.sizes if size.oracle))
        if watch.seconds:
            each = watch.seconds / len(sizes) / study.requests
            pages = study.prompt_tokens / study.requests / PAGE_TOKENS
            print(f"cost of the policy: {each * 1e6:.0f} us a request, {each / pages * 1e6:.2f} us a page", flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
