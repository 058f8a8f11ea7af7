"""A picture and a video in prompts on the emulated GPU: graphs, chunks, hits; transformers' tokens."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from tests.emulated_gpu.engines import answered, started
from tests.emulated_gpu.sample import sample
from tests.fixtures.vision_checkpoints import SEEING, vision_checkpoint
from tests.oracle.test_pictures import BIG, CLIP, seeing
from weft.engine.engine import EngineCore
from weft.engine.sleeper import Sleeper
from weft.request import PlacedPicture, Request, SamplingParams
from weft.runner.torch_executor import GRAPH, TorchExecutor

STEPS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "without graphs": {"cuda_graphs": "off"},
    "without overlap": {"overlap": "off"},
}
Prompt = tuple[list[int], list[PlacedPicture]]


def said(core: EngineCore, prompts: list[Prompt], name: str) -> list[list[int]]:
    return answered(
        core,
        [
            Request(request_id=f"{name}{at}", prompt_tokens=prompt, sampling=GREEDY, pictures=pictures)
            for at, (prompt, pictures) in enumerate(prompts)
        ],
    )


def after_sleep(core: EngineCore, prompts: list[Prompt], card: Card) -> list[list[int]]:
    card.serving = False
    sleeper = Sleeper(core)
    sleeper.sleep(1)
    sleeper.wake_up()
    card.begin_serving()
    return said(core, prompts, "slept")


@pytest.mark.parametrize("way", sample(WAYS, 1))
@pytest.mark.parametrize("name", sample(SEEING[1:], 1))
def test_answers_about_pictures_are_those_of_transformers(name: str, way: str) -> None:
    """Text decodes beside them; the second time prefixes are hit, and the batch's rows change hands; then the
    engine sleeps."""
    cases = [seeing(name, 20, (CLIP,), 12, seed=2), seeing(name, 40, (BIG,), 40, seed=7)]
    prompts = [*((case.tokens, case.pictures) for case in cases), (cases[0].tokens[:15], [])]
    with emulated() as card, started(card, f"{vision_checkpoint(name)}", **WAYS[way]) as engine:
        first = said(engine.core, prompts, "first")
        second = said(engine.core, prompts[::-1], "second")
        slept = after_sleep(engine.core, prompts, card) if way == "without graphs" else second[::-1]
        assert bool(card.replays) == (way != "without graphs")
        forms = cast(TorchExecutor, engine.core.executor).steps_by_form
        assert {form for form, count in forms.items() if count} == ({GRAPH} if card.replays else set())
    assert not card.reports, [str(report) for report in card.reports]
    assert first[:2] == [case.truth.tokens[:STEPS] for case in cases]
    assert second == first[::-1]
    assert slept == first, "rows are encoded again, into an arena of another place"
