"""The order of arena work: the scripted device performs it as ``ArenaWork.ordered`` says, and an executor
with another order is caught."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from tests.support.digests import PlanViolation
from tests.support.scripted import ScriptedExecutor
from tests.support.sharing import sharing_scenario
from tests.support.simulator import Simulation, SimulationFailed
from tests.support.workload import small_arena
from tests.unit.runner import plans
from weft.memory.arena_work import ArenaWork, CompressState, Int32s, RestoreState, WorkKind
from weft.memory.values import NO_NODE
from weft.schedule.plan import StepPlan, Tap
from weft.units import FrameId, PageId, SlotId

PROMPT = [(5 * at + 1) % 97 for at in range(130)]
COMPRESSED = (PageId(30), PageId(31))
SHARED = [(1, index, 10 + index) for index in range(4)]
OWN = [(1, index, 20 + index) for index in range(4, 9)]
ORDERED = ArenaWork.ordered


def device() -> ScriptedExecutor:
    arena = replace(small_arena(pages_per_frame=10, slots_per_frame=4, frame_count=8), compressed_pages=2)
    return ScriptedExecutor(arena, vocab_size=97, rows_max=4, max_model_len=400, step_tokens_bound=512)


def steps() -> Iterator[StepPlan]:
    """A prompt keeps its states at 64 and 128. The one at 64 is compressed, into a frame that is zeroed in
    the same step. Then it is restored for a second sequence, and in that step its pages get the one at
    128."""
    yield plans.plan(
        [(0, 0, PROMPT, 0, True)],
        admissions=[plans.admission(0, PROMPT)],
        table_writes=[(0, index, 10 + index) for index in range(9)],
        zero_frames=[0, 1, 2],
        taps=[Tap(0, 64, SlotId(1)), Tap(0, 128, SlotId(2))],
    )
    yield replace(
        plans.plan(),
        arena_work=ArenaWork(
            zero_frames=(FrameId(3),), state_compressions=(CompressState(NO_NODE, SlotId(1), COMPRESSED),)
        ),
    )
    yield replace(
        plans.plan(
            [(1, 64, PROMPT[64:], 3, True)],
            fresh=[False],
            admissions=[plans.admission(1, PROMPT)],
            table_writes=[*SHARED, *OWN],
        ),
        arena_work=ArenaWork(
            state_restores=(RestoreState(COMPRESSED, SlotId(3)),),
            state_compressions=(CompressState(NO_NODE, SlotId(2), COMPRESSED),),
        ),
    )


def run() -> list[int]:
    """Tokens of each step."""
    executor = device()
    return [token for plan in steps() for token in executor.execute(plan).tokens.tolist()]


def with_order(patch: pytest.MonkeyPatch, first: Sequence[WorkKind]) -> None:
    """``first`` are performed before all others."""

    def ordered(work: ArenaWork) -> Iterator[tuple[WorkKind, Int32s]]:
        return iter(sorted(ORDERED(work), key=lambda item: item[0] not in first))

    patch.setattr(ArenaWork, "ordered", ordered)


def test_the_one_order_reads_what_is_compressed_before_it_compresses() -> None:
    cold, resumed = run()
    assert cold == resumed


def test_compressing_before_restoring_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with_order(monkeypatch, [WorkKind.ZERO_FRAMES, WorkKind.COMPRESS_STATES])
    with pytest.raises(PlanViolation, match="does not hold the state after 64"):
        run()


def test_zeroing_last_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with_order(monkeypatch, [kind for kind in WorkKind if kind is not WorkKind.ZERO_FRAMES])
    with pytest.raises(PlanViolation, match="L6"):
        run()


def simulate(seeds: Iterable[int]) -> None:
    for seed in seeds:
        Simulation(sharing_scenario(seed)).run()


def test_an_engine_whose_executor_reverses_the_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaWork, "ordered", lambda work: reversed(list(ORDERED(work))))
    with pytest.raises(SimulationFailed, match=r"L6|holds no|does not hold"):
        simulate(range(12))
