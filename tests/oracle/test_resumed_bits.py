"""A resumed answer goes on with the same logits, to the bit: three answers of one request, as after kill -9.

The first engine decodes each of them beside the others. The next one computes its tokens in a prefill, beside
other requests. Torch's products have bits that depend on the rows beside them: with those, one sampled token
in many thousands was another.
"""

from __future__ import annotations

from tests.fixtures.checkpoints import checkpoint
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.request import Request, Resumption, SamplingParams
from weft.tensor import native

PROMPT = [(7 * i * i + 3 * i) % 500 for i in range(70)]
Said = dict[int, list[tuple[int, float]]]
"""Of each answer: its tokens and their logprobs."""


def sampling(n: int, seed: int) -> SamplingParams:
    return SamplingParams(n=n, seed=seed, temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=1)


def said(*beside: Request, seed: int = 11, so_far: Said | None = None) -> Said:
    """What an engine adds to ``so_far``, while it answers ``beside``."""
    assembled = assemble(
        EngineConfig(model=str(checkpoint("qwen3_5")), memory="32MB", threads=1, max_model_len=256),
        on_progress=lambda line: None,
    )
    resumption = so_far and Resumption(answers={i: [token for token, _ in one] for i, one in so_far.items()})
    answers: Said = {index: [] for index in range(3)}
    try:
        for request in (
            Request(request_id="a", prompt_tokens=PROMPT, sampling=sampling(3, seed), resumption=resumption or None),
            *beside,
        ):
            assembled.core.submit(request)
        while assembled.core.has_work:
            for event in assembled.core.step():
                if event.request_id == "a":
                    answers[event.index] += [(one.token, one.logprob) for one in event.logprobs or ()]
        return answers
    finally:
        assembled.core.close()


def others(count: int) -> list[Request]:
    return [
        Request(
            request_id=f"b{i}", prompt_tokens=[(11 * j + i) % 500 for j in range(9 + 13 * i)], sampling=sampling(1, i)
        )
        for i in range(count)
    ]


def test_a_resumed_answer_has_the_bits_of_one_that_was_never_interrupted() -> None:
    if native.MISSING is not None:
        return
    whole = said()
    for length in 1, 17, 33:
        so_far = {index: one[: length - index % 2] for index, one in whole.items()}
        rest = said(*others(length % 7), so_far=so_far)
        assert {index: so_far[index] + rest[index] for index in whole} == whole


def test_an_answer_that_resumes_with_another_seed_is_told_apart() -> None:
    """The control."""
    whole = said()
    so_far = {index: one[:17] for index, one in whole.items()}
    rest = said(seed=12, so_far=so_far)
    assert all(so_far[index] + rest[index] != whole[index] for index in whole)
