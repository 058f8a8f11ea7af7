"""Several replays for comparison: arms x stores x memory sizes, with the bound of an infinite cache and the oracle.

The oracle of a size gets the times of requests from the replay of the first arm at that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from weft.costs.step import CostModel
from weft.memory.frames.plan import ArenaPlan
from weft.units import CHUNK_TOKENS
from weft_tools.sim.arms import Arm
from weft_tools.sim.oracle import Hindsight, InfiniteCache, OracleMemory, Span, infinite_cache, oracle
from weft_tools.sim.replay import ROWS_MAX, STEP_TOKENS_MAX, replay, sizes_for
from weft_tools.sim.report import Report
from weft_tools.sim.store_tier import StoreModel
from weft_tools.sim.traffic import Traffic

OnStudyProgress = Callable[[str, int, int, int], None]
"""Called with the running part, its number (from 0), its ended requests, and requests in all."""


@dataclass(frozen=True, slots=True)
class Sized:
    """One memory size: a report for each arm and store, and the oracle's report if requested."""

    memory_bytes: int
    reports: tuple[Report, ...]
    oracle: Hindsight | None


@dataclass(frozen=True, slots=True)
class Study:
    requests: int
    linked: int
    duration_s: float
    prompt_tokens: int
    bound: InfiniteCache
    sizes: tuple[Sized, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "linked_turns": self.linked,
            "duration_s": self.duration_s,
            "prompt_tokens": self.prompt_tokens,
            "infinite": {"pages": self.bound.page_rate, "states": self.bound.state_rate},
            "oracle": [
                {"memory_bytes": size.memory_bytes, "hit_rate": size.oracle.hit_rate, "saved_s": size.oracle.saved_s}
                for size in self.sizes
                if size.oracle is not None
            ],
            "results": [report.to_json() for size in self.sizes for report in size.reports],
        }


def run_study(
    traffic: Traffic,
    plans: Sequence[ArenaPlan],
    cost: CostModel,
    arms: Sequence[Arm],
    *,
    stores: Sequence[StoreModel | None] = (None,),
    asked_bytes: Sequence[int] | None = None,
    oracle: bool = True,
    rows_max: int = ROWS_MAX,
    step_tokens_max: int = STEP_TOKENS_MAX,
    length_max: int | None = None,
    grid_tokens: int = CHUNK_TOKENS,
    on_progress: OnStudyProgress | None = None,
) -> Study:
    """Replay every arm of ``arms`` over each of ``stores`` on every arena of ``plans``; requests longer than
    ``length_max`` are refused. ``asked_bytes``: the memory that each was made for, whole frames or not."""
    sized = []
    run = 0
    for index, plan in enumerate(plans):
        sizes = sizes_for(
            plan,
            traffic,
            rows_max=rows_max,
            step_tokens_max=step_tokens_max,
            length_max=length_max,
            grid_tokens=grid_tokens,
        )
        reports = []
        for store, arm in product(stores, arms):
            tell = None if on_progress is None else partial(on_progress, arm.name, run)
            reports.append(replay(traffic, plan, cost, arm=arm, sizes=sizes, store=store, on_progress=tell))
            run += 1
        known = hindsight(traffic, plan, cost, reports[0], grid_tokens) if oracle else None
        memory_bytes = plan.arena_bytes if asked_bytes is None else asked_bytes[index]
        sized.append(Sized(memory_bytes, tuple(reports), known))
    linked = sum(request.next_turn is not None for request in traffic.requests)
    return Study(
        len(traffic),
        linked,
        traffic.requests[-1].at_s - traffic.requests[0].at_s,
        traffic.prompt_tokens,
        infinite_cache(traffic, grid_tokens),
        tuple(sized),
    )


def hindsight(
    traffic: Traffic, plan: ArenaPlan, cost: CostModel, report: Report, grid_tokens: int = CHUNK_TOKENS
) -> Hindsight:
    """Return the oracle's hits for the requests that ran in ``report``, in the memory of ``plan``, with states on
    multiples of ``grid_tokens``."""
    times = report.timeline
    spans: list[Span | None] = []
    for began, first, ended in zip(times.began_s.tolist(), times.first_s.tolist(), times.ended_s.tolist(), strict=True):
        ran = not (np.isnan(began) or np.isnan(ended))
        spans.append(Span(began, ended if np.isnan(first) else first, ended) if ran else None)
    memory = OracleMemory(plan.arena_bytes, plan.page_bytes / plan.page_tokens, plan.slot_stride_bytes, grid_tokens)
    return oracle(traffic, spans, memory, cost)
