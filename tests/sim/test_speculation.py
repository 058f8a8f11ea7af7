"""The whole engine in virtual time with verify runs: short memory, bursts, cancels between and inside
steps, dying devices, prefixes shared in flight. ``Simulation`` checks every law after each step, and every
answer against the reference; a drafter that knows greedy answers is right, wrong and right for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from tests.fixtures.drafters import AnswerDrafter
from tests.sim.failing import assert_fails
from tests.support.digests import digest, digest_of
from tests.support.scripted import ScriptedExecutor, hashed_token
from tests.support.sharing import sharing_scenario
from tests.support.simulator import Simulation
from tests.support.workload import VOCAB_SIZE, Scenario, scenario_from_seed
from weft.schedule.plan import Int32s, StepPlan
from weft.schedule.verify_runs import VerifyPlanner
from weft.speculation.drafter import DraftRow


class GreedyDrafter(AnswerDrafter):
    """It knows what greedy sequences say. Sampled ones get drafts that are wrong."""

    def __init__(self, most: int = 6) -> None:
        super().__init__("random", {}, VOCAB_SIZE, most=most)
        self._states: dict[int, list[int]] = {}
        self._choose = hashed_token(VOCAB_SIZE)

    def begin(self, key: int, tokens: Int32s, **facts: object) -> None:
        super().begin(key, tokens, **facts)
        self._states[key] = [digest_of(tokens.tolist())]

    def _of(self, row: DraftRow) -> tuple[int, ...]:
        state, draft = self._states[row.key][0], []
        chance = Random(state)
        for _ in range(chance.randrange(min(row.limit, self.most) + 1)):
            token = self._choose(state, 0) if chance.random() < 0.9 else chance.randrange(VOCAB_SIZE)
            draft.append(token)
            state = digest(state, token)
        return tuple(draft)

    def settle(self, key: int, tokens: Sequence[int], *, drafted: int, accepted: int) -> None:
        super().settle(key, tokens, drafted=drafted, accepted=accepted)
        for token in tokens:
            self._states[key][0] = digest(self._states[key][0], token)


def run(scenario: Scenario) -> GreedyDrafter:
    drafter = GreedyDrafter()
    Simulation(scenario, drafter).run()
    return drafter


@pytest.mark.parametrize("make", [scenario_from_seed, sharing_scenario])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_law_holds_with_windows(make: Callable[[int], Scenario], overlap: bool) -> None:
    drafters = [run(replace(make(seed), overlap=overlap)) for seed in range(8)]
    assert sum(drafter.accepted for drafter in drafters) > 100
    assert sum(drafter.drafted for drafter in drafters) > sum(drafter.accepted for drafter in drafters) + 100


def test_the_same_seed_gives_the_same_trace_with_windows() -> None:
    first, again = (Simulation(scenario_from_seed(5), GreedyDrafter()).run() for _ in range(2))
    assert first == again
    assert first != Simulation(scenario_from_seed(5)).run()


def test_drafts_without_pages_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifyPlanner, "_with_pages", lambda planner, step, row, count: count)
    assert_fails("the page table ends", lambda: [run(scenario_from_seed(seed)) for seed in range(14)])


def test_a_state_that_has_seen_a_wrong_draft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the report of a full rejection that commits a snapshot nobody wrote."""
    verify = ScriptedExecutor._verify

    def too_far(device: ScriptedExecutor, plan: StepPlan, at: int, row: object, logprobs: object) -> object:
        chosen = verify(device, plan, at, row, logprobs)
        if device._slots and len(chosen) < int(plan.lengths[at]):
            device.arena.states[int(plan.slots[at])] = digest(row.state_at(row.computed), 1)
        return chosen

    monkeypatch.setattr(ScriptedExecutor, "_verify", too_far)
    assert_fails("does not hold the state", lambda: [run(scenario_from_seed(seed)) for seed in range(14)])
