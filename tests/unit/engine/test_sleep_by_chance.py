"""Sleeps at any moment, under random traffic, with tiny memory and with overlapped steps: what is not aborted
is answered as if it had been alone, and every law holds after each step."""

from __future__ import annotations

import random

import pytest

from tests.support.scripted import reference_tokens
from tests.unit.engine.rig import EOS, Rig
from weft.engine.sleeper import Sleeper
from weft.engine.stats import PARTS
from weft.request import SamplingParams

STEPS = 160


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_an_engine_that_never_slept(seed: int, overlap: bool) -> None:
    dice = random.Random(seed)
    rig = Rig(cache=True, frame_count=9, rows_max=3, overlap=overlap)
    sleeper = Sleeper(rig.core)
    prompts: dict[str, list[int]] = {}
    sleeps = aborted = 0
    for number in range(STEPS):
        if dice.random() < 0.25:
            shared = [dice.choice((5, 9))] * dice.randrange(1, 90)
            prompts[f"r{number}"] = shared + [dice.randrange(90) for _ in range(9)]
            rig.submit(f"r{number}", prompts[f"r{number}"], max_tokens=dice.randrange(1, 20))
        rig.step()
        if dice.random() < 0.08:
            aborted += rig.core.live_count
            sleeper.sleep(dice.choice((1, 2)), abort=True)
            sleeps += 1
            for part in dice.sample(PARTS, 2):
                sleeper.wake_up([part])
    rig.run()
    assert rig.core.failure is None
    assert sleeps > 4
    finished = 0
    for name, prompt in prompts.items():
        answer = rig.answers[name, 0]
        assert answer.ends == 1
        expected, _ = reference_tokens(
            prompt,
            SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            seed=0,
            eos_ids=(EOS,),
            max_model_len=rig.sizes.max_model_len,
            next_token=rig.device.next_token,
        )
        assert answer.tokens == expected[: len(answer.tokens)]
        finished += answer.reason == "length"
    assert finished > 10
    assert 0 < aborted < len(prompts)
