"""The model's own head over ranks: divided as a layer of the trunk, with the drafts of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from tests.fixtures.mtp_heads import with_head
from tests.oracle.test_mtp import EMBEDDED, FREE
from tests.oracle.test_mtp_heads import Listening as Drafting
from tests.ranks.engines import GREEDY, SAMPLED, Story, engine, own_executor, prompt, run
from tests.ranks.threads import load_ranks
from weft.assemble import assembly
from weft.costs.rows import RowCosts
from weft.families.architecture import Architecture
from weft.families.rank_place import RankPlace
from weft.memory.frames.plan import plan_arena
from weft.models import mtp
from weft.models.decoder import CausalModel
from weft.models.weights import TensorSource
from weft.planning.model_plan import PlanOptions, make_plan
from weft.ranks.peers import Peers
from weft.schedule.plan import StepPlan
from weft.speculation.speculator import Speculator

ASKED = {
    "a": (prompt(100, 1), replace(GREEDY, max_tokens=40)),
    "b": (prompt(30, 2), GREEDY),
    "c": (prompt(20, 3), SAMPLED),
}


class Listening(Speculator):
    """Finds every draft of the head worth it, and keeps what the head offered."""

    def __init__(self) -> None:
        super().__init__(("mtp",), costs=RowCosts(FREE), head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})
        self.offered: list[tuple[int, ...]] = []

    def offer(self, key: int, tokens: Any, chances: Any) -> None:
        self.offered.append(tuple(tokens))
        super().offer(key, tokens, chances)


Source = TypeVar("Source", bound=Speculator)


def answers(
    peers: Peers | None,
    monkeypatch: pytest.MonkeyPatch,
    directory: Path = EMBEDDED,
    make: Callable[[], Source] = Listening,
) -> tuple[Story, Source]:  # type: ignore[assignment]
    source = make()
    monkeypatch.setattr(assembly, "make_drafter", lambda *more: source)
    assembled = engine(directory, peers=peers, speculate="mtp")
    story = run(assembled, ASKED, Story())
    assembled.core.close()
    return story, source


def test_drafts_and_tokens_are_those_of_one_rank(two: Peers, four: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two KV heads on four ranks, too: neighbours hold a copy of the head's."""
    expected, alone = answers(None, monkeypatch)
    assert alone.stats().sources["mtp"].accepted > 8
    for peers in (two, four):
        story, source = answers(peers, monkeypatch)
        assert story.tokens == expected.tokens
        assert source.offered == alone.offered
        assert source.stats().sources == alone.stats().sources


@pytest.mark.parametrize("name", ["glm5_next", "qwen4_exp"])
def test_a_head_of_another_family_drafts_over_ranks(
    name: str, tmp_path: Path, two: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of latent attention are divided; latents, indexes and joins are whole on every rank."""
    directory = with_head(tmp_path / name, name)
    (expected, alone), (story, source) = (
        answers(peers, monkeypatch, directory, lambda: Drafting(2, dear=False)) for peers in (None, two)
    )
    assert story.tokens == expected.tokens
    assert source.offered == alone.offered
    assert source.stats().drafted == alone.stats().drafted > 10
    the_head_of_a_rank_is_that_of_the_plan(directory)


def test_the_head_of_a_rank_is_that_of_the_plan() -> None:
    the_head_of_a_rank_is_that_of_the_plan(EMBEDDED)


def the_head_of_a_rank_is_that_of_the_plan(directory: Path) -> None:
    """Weights and the layout of its keys, with ``weft plan --tp 2 --speculate mtp``."""
    config = json.loads((directory / "config.json").read_text())
    asked = [PlanOptions(arena_bytes=3 << 20, tp=2, mtp=mtp) for mtp in (True, False)]
    plan, without = (make_plan("", config, one) for one in asked)
    assert plan.weights.rank_bytes > without.weights.rank_bytes
    for loaded in load_ranks(directory, 2, mtp=True):
        assert loaded.weights_bytes == pytest.approx(plan.weights.rank_bytes, rel=0.01)
        assert plan_arena(loaded.spec, 3 << 20) == plan.arena != without.arena


def test_all_ranks_see_which_pages_are_new(two: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head zeroes its keys in them, on each rank."""
    source, plans = Listening(), list[StepPlan]()
    monkeypatch.setattr(assembly, "make_drafter", lambda *more: source)
    tell = two.tell

    def noting(message: object) -> None:
        plans.extend([message] if isinstance(message, StepPlan) else [])
        tell(message)

    monkeypatch.setattr(two, "tell", noting)
    assembled = engine(EMBEDDED, peers=two, speculate="mtp")
    own = list[StepPlan]()
    own_executor(assembled).before_step = own.append
    run(assembled, {"a": ASKED["a"]}, Story())
    assembled.core.close()
    assert any(plan.reservation.pages for plan in own)
    assert any(plan.reservation.frames for plan in own)
    assert [(plan.reservation.pages, plan.reservation.frames) for plan in plans] == [
        (plan.reservation.pages, plan.reservation.frames) for plan in own
    ]


def test_a_rank_with_the_head_of_its_neighbour_shows(two: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rank 0 holds the part of rank 1. Drafts are others, and no token is."""
    expected, alone = answers(None, monkeypatch)
    build = mtp.build_mtp

    def of_neighbour(architecture: Architecture, source: TensorSource, trunk: CausalModel) -> mtp.MtpHead:
        source.place = RankPlace(1, 2)
        return build(architecture, source, trunk)

    monkeypatch.setattr(mtp, "build_mtp", of_neighbour)
    story, source = answers(two, monkeypatch)
    assert story.tokens == expected.tokens
    assert source.offered != alone.offered
