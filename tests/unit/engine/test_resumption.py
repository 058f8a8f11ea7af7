"""A request that another engine began goes on here: the same tokens, the same end, first in its queue."""

from __future__ import annotations

import random
from typing import Any

import pytest

from weft.errors import QueueFullError, RequestError
from weft.request import Request, Resumption, SamplingParams

from .rig import VOCAB_SIZE, Rig

PROMPT = [(7 * at + 1) % VOCAB_SIZE for at in range(75)]


def request(name: str = "a", resumption: Resumption | None = None, **sampling: Any) -> Request:
    fields = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "seed": 9, **sampling}
    chosen = SamplingParams(**fields)
    return Request(request_id=name, prompt_tokens=PROMPT, sampling=chosen, resumption=resumption)


@pytest.mark.parametrize("cache", [False, True])
def test_the_rest_of_an_answer_is_that_of_an_engine_that_never_ended(cache: bool) -> None:
    whole = Rig(cache=cache)
    whole.core.submit(request(n=3))
    whole.run()
    expected = [whole.tokens("a", index) for index in range(3)]
    rng = random.Random(4)
    for _ in range(6):
        lengths = [rng.randrange(40) for _ in range(2)]
        rig = Rig(cache=cache)
        so_far = {index: expected[index][:length] for index, length in zip((0, 2), lengths, strict=True)}
        rig.core.submit(request(n=3, resumption=Resumption(answers=so_far)))
        answers = rig.run()
        assert set(answers) == {("a", 0), ("a", 2)}, "answer 1 has ended, and gets no sequence"
        for index, length in zip((0, 2), lengths, strict=True):
            answer = answers["a", index]
            assert expected[index][:length] + answer.tokens == expected[index]
            assert (answer.reason, answer.ends) == ("length", 1)
            assert answer.events[-1].cached_tokens <= len(PROMPT)
            if not cache:
                recomputed = len(PROMPT) + length - 1 if length else 0
                assert answer.events[-1].recomputed_tokens == recomputed


def test_logprobs_of_a_prompt_are_not_reported_again() -> None:
    rig = Rig()
    rig.core.submit(request(n=2, prompt_logprobs=1, resumption=Resumption(answers={0: [5], 1: []})))
    answers = rig.run()
    assert all(event.prompt_logprobs is None for event in answers["a", 0].events)
    [reported] = [event for event in answers["a", 1].events if event.prompt_logprobs is not None]
    assert reported.prompt_logprobs is not None
    assert len(reported.prompt_logprobs) == len(PROMPT)


def test_it_goes_before_others_and_past_the_bound_of_the_queue() -> None:
    rig = Rig(queue_max=2, rows_max=1)
    for name in ("b", "c"):
        rig.core.submit(request(name))
    with pytest.raises(QueueFullError):
        rig.core.submit(request("d"))
    rig.core.submit(request("a", Resumption(answers={0: [5, 6]})))
    ends = [event.request_id for _ in range(200) for event in rig.step() if event.finish_reason]
    assert ends == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("answers", "said"),
    [({3: [1]}, "answer 3"), ({0: [1] * 40}, "40 tokens"), ({0: [VOCAB_SIZE]}, "outside of 0 to 96")],
)
def test_a_resumption_that_cannot_be_is_refused(answers: dict[int, list[int]], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Rig().core.submit(request(n=2, resumption=Resumption(answers=answers)))
