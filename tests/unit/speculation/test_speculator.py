"""The drafter as the planner sees it: what it drafts, what it learns, and what it never does."""

from __future__ import annotations

import random

import pytest

from tests.unit.speculation.texts import edited, int32s, prose
from weft.costs.rows import RowCosts
from weft.speculation.drafter import PLAIN_STEPS, SOURCES, DraftRow, SourceName
from weft.speculation.speculator import DRAFTS_MAX, Speculator
from weft_tools.sim.speculation import KnownText, ReplayedSpeculation, replay

CPU = {1: 26.8, 2: 27.4, 4: 28.9, 8: 32.2, 16: 42.0}
FILE = prose(1, 1000)


def speculator(*sources: SourceName) -> Speculator:
    return Speculator(sources or SOURCES, costs=RowCosts(CPU))


def replayed(drafter: Speculator, *texts: KnownText) -> ReplayedSpeculation:
    return replay(drafter, texts, RowCosts(CPU))


def test_an_edited_file_with_a_prediction_is_three_times_as_fast() -> None:
    answer = edited(FILE, 0.05, 2)
    result = replayed(speculator("prediction"), KnownText(prose(3, 300), answer, prediction=FILE))
    assert result.tokens == len(answer) - 1
    assert result.speedup > 3.0


def test_an_edited_file_in_the_prompt_needs_no_prediction() -> None:
    result = replayed(speculator(), KnownText(FILE, edited(FILE, 0.05, 2)))
    assert result.speedup > 2.5


def test_text_without_repetition_loses_nothing() -> None:
    texts = [KnownText(prose(seed, 300), prose(seed + 50, 400)) for seed in range(8)]
    drafter = speculator()
    result = replayed(drafter, *texts)
    assert result.speedup > 0.985


def test_a_prediction_of_another_text_loses_nothing() -> None:
    result = replayed(speculator(), KnownText(FILE[:200], prose(7, 800), prediction=prose(8, 800)))
    assert result.speedup > 0.97


def test_answers_are_remembered_for_later_requests_of_their_salt_alone() -> None:
    answer = prose(11, 400)
    for salt, gain in (("a", 3.0), ("b", 0.9)):
        drafter = speculator("suffix")
        replayed(drafter, KnownText(prose(9, 100), answer, salt="a"))
        result = replayed(drafter, KnownText(prose(10, 100), answer, salt=salt))
        assert (result.speedup > 2.0) == (gain > 1)


def test_a_dropped_plan_changes_nothing() -> None:
    """One drafter is asked twice in each step, with other limits in between."""
    answer = edited(FILE, 0.05, 4)
    once, twice = speculator(), speculator()
    chance = random.Random(5)
    for drafter in (once, twice):
        drafter.begin(1, int32s([*FILE, answer[0]]), prompt_length=len(FILE), salt=None, prediction=None)
    at = 1
    while at < len(answer) - 1:
        row = DraftRow(1, min(12, len(answer) - at - 1))
        twice.draft([row, DraftRow(99, 5)])
        twice.draft([DraftRow(1, chance.randint(0, 12))])
        drafts = twice.draft([row])
        assert drafts == once.draft([row])
        planned = drafts.get(1, ())[: chance.randint(0, 12)]
        accepted = 0
        while accepted < len(planned) and planned[accepted] == answer[at + accepted]:
            accepted += 1
        for drafter in (once, twice):
            drafter.settle(1, answer[at : at + accepted + 1], drafted=len(planned), accepted=accepted)
        at += accepted + 1
    assert once.stats().accepted == twice.stats().accepted > 300


def test_no_draft_exceeds_its_limit() -> None:
    drafter = Speculator(costs=RowCosts({1: 1.0, 16: 1.001}))
    drafter.begin(1, int32s(FILE + FILE[:100]), prompt_length=len(FILE), salt=None, prediction=None)
    for limit in (0, 1, 4, 100):
        drafts = drafter.draft([DraftRow(1, limit)]).get(1, ())
        assert min(limit, 12) <= len(drafts) <= min(limit, DRAFTS_MAX)
        assert drafts == tuple(FILE[100 : 100 + len(drafts)])
    assert drafter.draft([DraftRow(2, 5)]) == {}


def test_a_source_that_never_pays_pauses_and_one_that_begins_to_pay_is_noticed() -> None:
    drafter = Speculator(("suffix",), costs=RowCosts({rows: float(rows) for rows in (1, 2, 4, 8, 16, 32)}))
    drafter.begin(1, int32s(FILE[:50]), prompt_length=49, salt=None, prediction=None)
    asked = 0
    for token in prose(20, 400):
        drafter.draft([DraftRow(1, 10)])
        asked += not drafter._by_key[1].sources[0].pause
        drafter.settle(1, [token], drafted=0, accepted=0)
    assert asked < 60
    steps = 0
    drafter.costs = RowCosts(CPU)
    for token in prose(20, 400)[:100]:
        if drafter.draft([DraftRow(1, 10)]):
            break
        drafter.settle(1, [token], drafted=0, accepted=0)
        steps += 1
    assert steps <= 70


def test_a_plain_step_is_measured_before_the_first_draft_and_now_and_then() -> None:
    drafter = Speculator(("prediction",))
    drafter.begin(1, int32s([1, 2]), prompt_length=2, salt=None, prediction=[7] * 5000)
    for _ in range(PLAIN_STEPS):
        assert drafter.draft([DraftRow(1, 4)]) == {}
        drafter.observe(1, 0, 0.02)
    plain = 0
    for _ in range(1000):
        drafts = drafter.draft([DraftRow(1, 4)]).get(1, ())
        plain += not drafts
        drafter.settle(1, [7] * (1 + len(drafts)), drafted=len(drafts), accepted=len(drafts))
        drafter.observe(1, len(drafts), 0.02)
    assert plain in range(5 * PLAIN_STEPS, 7 * PLAIN_STEPS)


def test_a_source_in_the_middle_of_a_long_match_ends_the_asking() -> None:
    """The prompt has the same text. It is asked once, before the prediction has matched."""
    drafter = speculator("prediction", "suffix")
    replayed(drafter, KnownText(FILE, FILE, prediction=FILE))
    assert drafter.counters.proposed["prediction"] > 40
    assert drafter.counters.proposed["suffix"] <= 2


def test_counts_by_source_add_up() -> None:
    drafter = speculator()
    result = replayed(drafter, KnownText(FILE, edited(FILE, 0.05, 6), prediction=FILE))
    stats = drafter.stats()
    assert (stats.drafted, stats.accepted) == (result.drafted, result.accepted)
    assert stats.sources["prediction"].accepted > 0
    assert set(stats.sources) == set(SOURCES)
    assert stats.saved_s == pytest.approx(result.plain_seconds - result.seconds, rel=0.1)


def test_an_end_without_a_begin_and_a_second_end_are_no_errors() -> None:
    drafter = speculator()
    drafter.end(5)
    drafter.settle(5, [1], drafted=0, accepted=0)
    drafter.begin(5, int32s([1, 2]), prompt_length=1, salt=None, prediction=None)
    drafter.end(5)
    drafter.end(5)
    assert drafter._by_key == {}


def test_slept_steps_say_what_a_plain_step_costs() -> None:
    drafter = Speculator(("suffix",), costs=RowCosts({1: 1.0}))
    for _ in range(3):
        drafter._budget.rest()
        drafter.sleep_through(16, 80.0, 32, 5.0)
    assert drafter.costs.measured(32)
    assert drafter.costs.seconds(32) == pytest.approx(5.0)


class SlowGrammar:
    """A grammar that allows everything; each of its calls takes ``seconds`` of ``now``."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, 0

    def matcher(self) -> SlowGrammar:
        return self

    def work(self) -> None:
        self.now += self.seconds
        self.calls += 1

    def is_error(self) -> bool:
        return False

    is_stopped = is_error

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.work()
        return True

    def validate_tokens(self, tokens: list[int]) -> int:
        self.work()
        return len(tokens)

    def forced_tokens(self, matcher: SlowGrammar) -> list[int]:
        self.work()
        return []


@pytest.mark.parametrize(("seconds", "drafted"), [(0.00001, True), (0.005, False)])
def test_a_sequence_whose_grammar_is_slow_has_no_drafts(seconds: float, drafted: bool) -> None:
    grammar = SlowGrammar(seconds)
    drafter = Speculator(("prediction", "grammar"), costs=RowCosts(CPU), clock=lambda: grammar.now)
    drafter.begin(1, int32s(FILE[:10]), prompt_length=9, salt=None, prediction=FILE, grammar=grammar)
    steps, at = [], 10
    while at < 600:
        drafts = drafter.draft([DraftRow(1, 8)]).get(1, ())
        steps.append(len(drafts))
        drafter.settle(1, FILE[at : at + len(drafts) + 1], drafted=len(drafts), accepted=len(drafts))
        at += len(drafts) + 1
        drafter.wake()  # the seconds of the host are not what ends the drafts
    assert any(steps[10:]) == drafted
    assert grammar.calls > 100 if drafted else grammar.calls < 20
