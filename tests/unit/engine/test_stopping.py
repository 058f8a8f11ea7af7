import pytest

from weft.engine.submission import stop_ids, stop_rule
from weft.request import SamplingParams


@pytest.mark.parametrize(
    ("sampling", "token", "made", "reason"),
    [
        ({}, 3, 1, "stop"),
        ({}, 4, 1, None),
        ({"ignore_eos": True}, 3, 1, None),
        ({"stop_token_ids": (8,)}, 8, 1, "stop"),
        ({"ignore_eos": True, "stop_token_ids": (8,)}, 8, 1, "stop"),
        ({"max_tokens": 5}, 4, 4, None),
        ({"max_tokens": 5}, 4, 5, "length"),
        ({"max_tokens": 5}, 3, 5, "stop"),
        ({"min_tokens": 2}, 3, 1, None),
        ({"min_tokens": 2}, 3, 2, None),
        ({"min_tokens": 2}, 3, 3, "stop"),
        ({}, 4, 100, "length"),  # the context ends
        ({"max_tokens": 500}, 4, 100, "length"),
    ],
)
def test_a_token_ends_the_answer_when_and_only_when(sampling: dict, token: int, made: int, reason: str | None) -> None:
    rule = stop_rule(SamplingParams(**sampling), eos_ids=(3,), context_left=100)
    assert rule.reason(token, made) == reason


def test_the_stop_reason_is_named_only_for_ids_that_the_request_named() -> None:
    rule = stop_rule(SamplingParams(stop_token_ids=(8,)), eos_ids=(3,), context_left=100)
    assert rule.stop_reason(8) == 8
    assert rule.stop_reason(3) is None


def test_stop_ids_come_once_each() -> None:
    assert stop_ids(SamplingParams(stop_token_ids=(8, 3)), (3, 4)) == (3, 4, 8)
    assert stop_ids(SamplingParams(stop_token_ids=(8, 8), ignore_eos=True), (3, 4)) == (8,)
