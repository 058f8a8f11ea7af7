"""Costs that are given (``debug.step_costs``) are what an engine decides by; a text that is none is refused."""

from __future__ import annotations

import pytest

from tests.unit.engine.rig import Rig
from weft.costs.step import StepCost, Work, given_cost
from weft.errors import ConfigError

GIVEN = StepCost(fixed_s=0.5, token_s=0.02, decode_s=0.1)


def test_each_term_is_given_by_its_name_and_the_others_are_nothing() -> None:
    assert given_cost("measured") is None
    assert given_cost("fixed_s=0.5,token_s=0.02,decode_s=0.1") == GIVEN
    assert given_cost("token_s=1e-3") == StepCost(0.0, 1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not valid"),
        ("0.01", "'0.01' is not valid"),
        ("tokens=1", "'tokens=1' is not valid"),
        ("token_s=fast", "'token_s=fast' is not valid"),
        ("token_s=-1", "'token_s=-1' is not valid"),
        ("token_s=inf", "'token_s=inf' is not valid"),
        ("token_s=nan", "'token_s=nan' is not valid"),
        ("token_s=1,token_s=2", "'token_s=2' is not valid"),
        ("fixed_s=1", "token_s is missing"),
        ("token_s=0", "token_s is missing"),
    ],
)
def test_another_text_is_refused_with_what_is_wrong_in_it(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        given_cost(text)
    assert refusal.value.param == "debug.step_costs"


def test_an_engine_with_given_costs_measures_nothing_else() -> None:
    """Steps of the rig take a second each; the listeners hear what the costs say of the work."""
    for given in (None, GIVEN):
        rig = Rig(step_costs=given)
        heard: list[float] = []
        rig.core.on_step.append(lambda plan, seconds, heard=heard: heard.extend([seconds] * bool(plan.run_count)))
        rig.submit("a", list(range(3, 43)), max_tokens=3)
        rig.run()
        context = [Work(0, 0, 1, length) for length in (41, 42)]
        expected = [GIVEN.step_s(Work(40, 820, 0, 0)), *map(GIVEN.step_s, context)]
        assert heard == (pytest.approx(expected) if given else [1.0] * 3)
