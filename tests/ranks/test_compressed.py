"""``--no-exact`` with ranks: each rank compresses its own part of KV and states by the one plan.

All that no sequence reads is compressed as soon as it can be. The next turn of a conversation begins
behind KV of 8 bits or 4 on both ranks, and a state of 8. Its logits are near those of a cold
run, as on one rank. The control is a rank that does not restore its part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_engine_store_compressed import all_is_compressed
from tests.ranks.engines import GREEDY, Story, engine, prompt, run, whole_story
from weft.assemble import room
from weft.memory.frames.plan import ArenaPlan, with_compression
from weft.ranks import executor
from weft.ranks.messages import for_other_ranks
from weft.ranks.peers import Peers
from weft.schedule.plan import StepPlan
from weft.spec import COMPRESSED_KV_DTYPES, CompressedKvName, ModelSpec

__all__ = ["all_is_compressed"]
TOLERANCE = {"int8": 0.02, "int4": 0.1}
"""Of the largest logit, as on one rank (tests/oracle/test_engine_compressed_kv.py)."""
FIRST, NEXT = prompt(330, 3), prompt(40, 4)
TURN = [*FIRST, *NEXT]


@pytest.fixture(autouse=True)
def states_of_any_size_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of these models is smaller than a page. Rank 0 lays out the arena of all ranks."""
    plan_arena = room.plan_arena

    def planned(spec: ModelSpec, size: int, **more: Any) -> ArenaPlan:
        arena = plan_arena(spec, size, **more)
        return with_compression(arena, spec) if more["compress"] else arena

    monkeypatch.setattr(room, "plan_arena", planned)


def second_turn(family: str, peers: Peers | None, **changes: Any) -> tuple[Story, Any]:
    """The turn that follows what was compressed, and the usage of memory before it."""
    assembled = engine(checkpoint(family), peers=peers, **changes)
    run(assembled, {"first": (FIRST, GREEDY)}, Story())
    run(assembled, {"other": (prompt(9, 4), GREEDY)}, Story())  # some steps in which the rest is compressed
    usage = assembled.core.memory.usage()
    story = run(assembled, {"next": (TURN, GREEDY)}, Story())
    assembled.core.close()
    return story, usage


def gap(story: Story, truth: Story) -> float:
    """In the first step after the hit, of the largest logit."""
    key = ("next", len(TURN))
    return float((story.logits[key] - truth.logits[key]).abs().max() / truth.logits[key].abs().max())


def cold(family: str) -> Story:
    assembled = engine(checkpoint(family))
    story = run(assembled, {"next": (TURN, GREEDY)}, Story())
    assembled.core.close()
    return story


@pytest.mark.parametrize("dtype", COMPRESSED_KV_DTYPES)
@pytest.mark.parametrize("family", ["qwen3_5", "granite"])
def test_ranks_compress_what_one_rank_compresses(
    family: str, dtype: CompressedKvName, two: Peers, all_is_compressed: None
) -> None:
    changes: dict[str, Any] = {"exact": False, "compress_kv": dtype}
    truth = cold(family)
    alone, of_one = second_turn(family, None, **changes)
    ranked, of_two = second_turn(family, two, **changes)
    assert (of_two.pages_compressed, of_two.states_compressed) == (of_one.pages_compressed, of_one.states_compressed)
    assert of_two.pages_compressed >= 16
    assert of_two.states_compressed >= 1
    assert ranked.cached_tokens == alone.cached_tokens
    assert ranked.cached_tokens["next"] > 256
    assert 1e-5 < gap(ranked, truth) < TOLERANCE[dtype], "above rounding, or nothing was compressed"
    assert gap(ranked, alone) < 0.1 * gap(alone, truth), "a sum over ranks moves few codes"


@pytest.mark.parametrize("part", ["kv_restores", "state_restores"])
def test_a_rank_that_restores_nothing_shows(
    part: str, two: Peers, all_is_compressed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(plan: StepPlan) -> Any:
        return for_other_ranks(replace(plan, arena_work=replace(plan.arena_work, **{part: ()})))

    truth = cold("qwen3_5")
    monkeypatch.setattr(executor, "for_other_ranks", without)
    story, _ = second_turn("qwen3_5", two, exact=False)
    assert not gap(story, truth) < TOLERANCE["int8"], "NaN is not below it either"


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_kv_in_8_bits(kv_dtype: str, two: Peers) -> None:
    """Each rank rounds its own heads, as one rank rounds them."""
    truth, alone, ranked = (
        whole_story(engine(checkpoint("qwen3_5"), **changes))
        for changes in ({}, {"kv_dtype": kv_dtype}, {"kv_dtype": kv_dtype, "peers": two})
    )
    key = ("long", 100)
    of_rounding = float((alone.logits[key] - truth.logits[key]).abs().max())
    assert of_rounding > 1e-3
    assert float((ranked.logits[key] - alone.logits[key]).abs().max()) < 0.1 * of_rounding
