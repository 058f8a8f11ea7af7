"""Graphs of decode steps over ranks, with a stand-in that records nothing and runs at each replay.

Ranks are threads here. What needs a GPU, NCCL inside of a CUDA graph, is ``make test-ranks-gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.ranks.engines import CONFIG, GREEDY, SAMPLED, prompt
from tests.ranks.threads import load_ranks
from tests.support.graph_steps import EagerCapture
from weft.engine.engine import EngineCore
from weft.memory.frames.plan import fit_sizes, plan_arena
from weft.memory.memory import Memory
from weft.models.loading import LoadedModel, load_model
from weft.models.sharded_model import RankedModel
from weft.ranks.graph_capture import RankedCapture
from weft.ranks.messages import for_other_ranks
from weft.ranks.samplers import FollowingSampler
from weft.request import Request
from weft.runner.graphs import Replay
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.plan import StepPlan, StepResult

ASKED = {"a": (prompt(70, 1), GREEDY), "b": (prompt(9, 2), SAMPLED), "c": (prompt(20, 3), GREEDY)}
FAMILY = "qwen3_5"


@dataclass
class CountingCapture(EagerCapture):
    """``refused``: the number of the recording that fails, if one does. ``events``: recordings, replays."""

    refused: int = -1
    events: list[str] = field(default_factory=list)

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        number = self.events.count("record")
        self.events.append("record")
        hidden = run()
        if number == self.refused:
            raise RuntimeError("an op waits for the device")

        def replay() -> torch.Tensor:
            self.events.append(f"replay {len(hidden)}")
            return run()

        return replay


class Threads:
    """An executor of all ranks, each a thread of this process."""

    def __init__(self, ranks: list[TorchExecutor]) -> None:
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(len(ranks))

    def together(self, compute: Callable[[TorchExecutor], Any]) -> list[Any]:
        return list(self._pool.map(compute, self._ranks))

    def execute(self, plan: StepPlan) -> StepResult:
        others = for_other_ranks(plan)
        first: StepResult
        first, *_ = self.together(lambda rank: rank.execute(plan if rank is self._ranks[0] else others))
        return first

    def close(self) -> None:
        self._pool.shutdown()
        for rank in self._ranks:
            rank.close()


def answers(
    models: list[LoadedModel], captures: list[CountingCapture]
) -> tuple[dict[str, list[int]], list[TorchExecutor]]:
    arena = plan_arena(models[0].spec, 6 << 20)
    sizes = fit_sizes(CONFIG, models[0].spec, arena)
    executors = []
    for rank, loaded in enumerate(models):
        capture: Any = captures[rank] if captures else None
        if isinstance(loaded.model, RankedModel) and captures:
            capture = RankedCapture(capture, loaded.model.collectives)
        more: dict[str, Any] = {"sampler": partial(FollowingSampler, None)} if rank else {}
        executors.append(TorchExecutor(loaded.model, arena, sizes, capture=capture, **more))
    ranks = Threads(executors)
    ranks.together(lambda rank: rank.record_graphs())
    core = EngineCore(
        vocab_size=models[0].spec.vocab_size,
        sizes=sizes,
        memory=Memory(arena),
        executor=ranks,
        clock=lambda: 0.0,
        seed=0,
        eos_ids=(),
    )  # type: ignore[arg-type]
    for name, (tokens, sampling) in ASKED.items():
        core.submit(Request(request_id=name, prompt_tokens=tokens, sampling=sampling))
    said: dict[str, list[int]] = {}
    while core.has_work:
        for event in core.step():
            said.setdefault(event.request_id, []).extend(event.tokens)
        if core.failure is not None:
            raise core.failure
    core.close()
    return said, executors


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return answers([load_model(checkpoint(FAMILY))], [])[0]


def test_all_ranks_replay_the_same_sizes_and_no_token_changes(expected: dict[str, list[int]]) -> None:
    captures = [CountingCapture(), CountingCapture()]
    said, _ = answers(load_ranks(checkpoint(FAMILY), 2), captures)
    assert said == expected
    assert captures[0].events == captures[1].events
    assert captures[0].events.count("record") == 4, "sizes 1, 2, 4 and 8"
    assert "replay 4" in captures[0].events, "steps of three decodes"


def test_a_size_that_one_rank_cannot_record_is_used_by_none(expected: dict[str, list[int]]) -> None:
    """The largest is recorded first; then 4, which rank 1 refuses: steps of 3 rows use 8."""
    captures = [CountingCapture(), CountingCapture(refused=1)]
    said, executors = answers(load_ranks(checkpoint(FAMILY), 2), captures)
    assert said == expected
    graphs = [executor.graphs for executor in executors]
    assert [[shape.decodes for shape in one.shapes] for one in graphs if one] == [[1, 2, 4, 8]] * 2
    assert captures[0].events == captures[1].events
    assert "replay 4" not in captures[0].events
    assert "replay 8" in captures[0].events
