"""The whole engine in virtual time with compression. The executor checks that each compressed state is read
from its own pages, in order, and that a sequence which resumes on it gets the state of its tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.sharing import sharing_scenario
from tests.support.simulator import Simulation, SimulationFailed
from tests.support.workload import Scenario, small_arena
from tests.unit.memory.geometry import QWEN35_397B
from weft.costs.step import StepCost
from weft.errors import ConfigError
from weft.memory.arena_work import (
    NO_WORK,
    ArenaWork,
    CompressKv,
    CompressState,
    KvForm,
    PageCopy,
    RestoreKv,
    RestoreState,
    SlotCopy,
)
from weft.memory.frames.plan import plan_arena, with_compressed_kv
from weft.memory.usage import MemoryUsage
from weft.memory.values import NO_NODE
from weft.planning.roofline import ModelLoad, roofline
from weft.schedule.plan import StepPlan
from weft.schedule.plan_builder import PlanBuilder
from weft.units import PageId, SlotId
from weft_tools.sim.arms import find_arm

SEEDS = (0, 2, 3, 13, 14, 15, 21, 24, 26, 32, 33, 38)
"""Those of the first forty in which much is compressed, or begun on."""


def compression_scenario(seed: int) -> Scenario:
    """``sharing_scenario`` on frames of ten pages or a state. A compressed state takes two or three pages,
    compressed KV a third of its bytes, half of them, or a little more."""
    scenario = sharing_scenario(seed)
    frames = 7 + seed % 5
    arena = replace(
        small_arena(pages_per_frame=10, slots_per_frame=1 + seed % 2, frame_count=frames), compressed_pages=3 - seed % 2
    )
    arena = replace(arena, compressed_kv_bytes=arena.page_bytes * ((8 + seed % 2) if seed % 4 else 5) // 16)
    longest = min(scenario.sizes.max_model_len, (frames - 1) * 160)
    sizes = replace(scenario.sizes, memory_bytes=arena.arena_bytes, max_model_len=longest)
    arrivals = tuple(arrival for arrival in scenario.arrivals if fits(arrival.request, longest))
    return replace(scenario, arena=arena, sizes=sizes, arrivals=arrivals, fail_in_step=None)


def fits(request: object, longest: int) -> bool:
    most = request.sampling.max_tokens  # type: ignore[attr-defined]
    return len(request.prompt_tokens) + max(1, most or 0) <= longest  # type: ignore[attr-defined]


def run(seed: int, *, overlap: bool = False) -> tuple[str, MemoryUsage]:
    simulation = Simulation(replace(compression_scenario(seed), overlap=overlap))
    outcome = simulation.run()
    return outcome.trace_hash, simulation.core.memory.usage()


def run_all() -> list[tuple[str, MemoryUsage]]:
    return [run(seed) for seed in SEEDS]


def test_the_laws_hold_in_many_runs_with_compression() -> None:
    runs = run_all()
    assert sum(usage.cache.compressed for _, usage in runs) >= 100
    assert sum(usage.cache.restored for _, usage in runs) >= 15
    assert sum(usage.cache.evicted_states for _, usage in runs) >= 100
    assert sum(usage.cache.compressed_pages for _, usage in runs) >= 100
    assert sum(usage.cache.restored_pages for _, usage in runs) >= 50
    assert [trace for trace, _ in runs[:3]] == [run(seed)[0] for seed in SEEDS[:3]]


def test_what_is_compressed_stays_while_a_step_is_in_flight() -> None:
    compressed = [run(seed, overlap=True)[1].cache.compressed_pages for seed in (2, 3, 5)]
    assert min(compressed) > 0


@pytest.mark.parametrize("name", ["lru", "value", "every:512"])
def test_an_arm_compresses_only_where_its_name_says_so(name: str) -> None:
    arena = compression_scenario(2).arena
    cost = StepCost(fixed_s=1e-3, token_s=2e-5, pair_s=1e-9, decode_s=1e-5, context_s=1e-8)
    for arm, pages in ((find_arm(name), 0), (find_arm(f"{name}+compressed"), arena.compressed_pages)):
        plan = arm.make_memory(arena, cost, lambda: 0.0).plan
        assert plan.compressed_pages == pages
        assert (plan.compressed_kv_bytes > 0) == (pages > 0)
    assert find_arm(f"{name}+compressed").snapshots == find_arm(name).snapshots


def test_an_arm_compresses_in_as_many_bits_as_its_name_says() -> None:
    arena = plan_arena(QWEN35_397B, 20 << 30, compress=True)
    cost = StepCost(fixed_s=1e-3, token_s=2e-5, pair_s=1e-9, decode_s=1e-5, context_s=1e-8)
    bytes_by_name = {
        name: find_arm(name).make_memory(arena, cost, lambda: 0.0).plan.compressed_kv_bytes
        for name in ("lru", "lru+compressed", "lru+compressed4")
    }
    assert bytes_by_name == {
        "lru": 0,
        "lru+compressed": arena.compressed_kv_bytes,
        "lru+compressed4": with_compressed_kv(arena, "int4").compressed_kv_bytes,
    }
    assert bytes_by_name["lru+compressed"] > 1.5 * bytes_by_name["lru+compressed4"]
    with pytest.raises(ConfigError, match=r"\+compressed5.*each also with \+compressed or \+compressed4"):
        find_arm("lru+compressed5")


def test_what_is_compressed_and_copied_takes_the_time_that_its_bytes_take() -> None:
    """By hand, for a step of each; a fit has no number for it."""
    arena = plan_arena(QWEN35_397B, 20 << 30, compress=True)
    form = KvForm(arena.page_bytes, arena.compressed_kv_bytes)
    pages = tuple(map(PageId, range(4)))
    work = ArenaWork(
        state_compressions=(CompressState(NO_NODE, SlotId(0), pages),) * 2,
        state_restores=(RestoreState(pages, SlotId(0)),),
        kv_compressions=(CompressKv(NO_NODE, pages, 2, form),),
        kv_restores=(RestoreKv(NO_NODE, pages[:2], 0, pages[:3], form),),
        slot_copies=(SlotCopy(SlotId(0), SlotId(1)),),
        page_copies=(PageCopy(pages[0], pages[1]),) * 2,
    )
    expected = (
        3 * (arena.slot_bytes + arena.compressed_bytes)
        + 7 * (arena.page_bytes + arena.compressed_kv_bytes)
        + 2 * arena.slot_bytes
        + 4 * arena.page_bytes
    )
    assert work.moved_bytes(arena) == expected
    assert NO_WORK.moved_bytes(arena) == 0
    load = ModelLoad(dense_params=1e9, expert_params=0, expert_share=0, pair_flops=1e3, kv_bytes=1e3, state_bytes=1e6)
    one, eight = (roofline(load, "H100", count=count) for count in (1, 8))
    assert one.moved_s(expected) == eight.moved_s(expected) == expected / (0.7 * 3.35e12)
    assert StepCost(1.0, 1.0, 1.0, 1.0, 1.0).moved_s(expected) == 0


def with_work(plan: StepPlan, **changes: object) -> StepPlan:
    return replace(plan, arena_work=replace(plan.arena_work, **changes))  # type: ignore[arg-type]


def without_the_last_state(plan: StepPlan) -> StepPlan:
    return with_work(plan, state_compressions=plan.arena_work.state_compressions[:-1])


def with_pages_of_a_state_in_another_order(plan: StepPlan) -> StepPlan:
    return with_work(
        plan, state_restores=tuple(replace(one, pages=one.pages[::-1]) for one in plan.arena_work.state_restores)
    )


def without_the_last_kv(plan: StepPlan) -> StepPlan:
    """A step that does nothing else stays whole: an empty step would be caught for that alone."""
    without = with_work(plan, kv_compressions=plan.arena_work.kv_compressions[:-1])
    return without if plan.tokens.size or without.arena_work.kv_compressions else plan


def with_pages_restored_in_another_order(plan: StepPlan) -> StepPlan:
    return with_work(
        plan, kv_restores=tuple(replace(one, pages=one.pages[::-1]) for one in plan.arena_work.kv_restores)
    )


def without_kv_restores(plan: StepPlan) -> StepPlan:
    return with_work(plan, kv_restores=())


def without_state_restores(plan: StepPlan) -> StepPlan:
    return with_work(plan, state_restores=())


@pytest.mark.parametrize(
    "broken",
    [
        without_the_last_state,
        with_pages_of_a_state_in_another_order,
        without_state_restores,
        without_the_last_kv,
        with_pages_restored_in_another_order,
        without_kv_restores,
    ],
    ids=lambda broken: broken.__name__,
)
def test_the_executor_notices_when(broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    seal = PlanBuilder.seal
    monkeypatch.setattr(PlanBuilder, "seal", lambda *args: broken(seal(*args)))  # type: ignore[operator]
    with pytest.raises(SimulationFailed, match=r"compressed|holds no|does not hold"):
        run_all()
