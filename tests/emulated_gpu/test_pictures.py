"""A picture and a video in prompts on the emulated GPU: graphs, chunks, hits; transformers' tokens."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec import structs

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from tests.emulated_gpu.engines import answered, started
from tests.emulated_gpu.sample import sample
from tests.fixtures.vision_checkpoints import SEEING, vision_checkpoint
from tests.oracle.test_pictures import BIG, CLIP, seeing
from weft.engine.engine import EngineCore
from weft.engine.sleeper import Sleeper
from weft.models.vision import encoder
from weft.request import PlacedPicture, Request, SamplingParams, TokenEvent
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


SIDE = 32
"""Patches of the largest picture in each direction: twice those of the checkpoints."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose pictures have up to SIDE x SIDE patches."""
    directory = tmp_path_factory.mktemp("large") / "model"
    shutil.copytree(vision_checkpoint("qwen3_5_vl"), directory)
    file = directory / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] = (SIDE * settings["patch_size"]) ** 2
    file.write_text(json.dumps(settings))
    return directory


LONG: dict[str, Any] = {"max_model_len": 512, "memory": "24MiB"}


def shown(core: EngineCore) -> Request:
    """A request with the largest picture."""
    executor = cast(TorchExecutor, core.executor)
    assert executor.pictures is not None
    assert executor.pictures.vision is not None
    picture = executor.pictures.vision.largest()
    assert len(picture.tiles[0].patches) == SIDE * SIDE
    tokens = [5, *[executor.pictures.picture_tokens[0]] * picture.rows, 7]
    placed = PlacedPicture(digest=picture.digest, places=[(1, picture.rows)], data=picture.to_bytes())
    return Request(request_id="shown", prompt_tokens=tokens, sampling=GREEDY, pictures=[placed])


def test_the_start_counts_the_largest_picture_beside_a_step(large: Path) -> None:
    with emulated() as card, started(card, f"{large}", **LONG) as engine:
        card.values = False
        text = Request(request_id="text", prompt_tokens=[3, 4], sampling=structs.replace(GREEDY, max_tokens=40))
        assert [len(tokens) for tokens in answered(engine.core, [text, shown(engine.core)])] == [40, STEPS]
        assert engine.core.pictures.stats().encoded == 1
    assert not card.reports, [str(report) for report in card.reports]


def test_a_piece_of_a_picture_waits_for_the_one_before_the_last(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a tower's work would queue before a step, for as long as the host has seconds."""
    monkeypatch.setattr(encoder, "GPU_PIECE_PATCHES", 64, raising=False)
    with emulated() as card, started(card, f"{large}", **LONG) as engine:
        card.values = False
        executor = cast(TorchExecutor, engine.core.executor)
        [picture] = shown(engine.core).pictures
        assert executor.pictures is not None
        torch.cuda.synchronize()
        queued, issued, most = [card.default.issued], card.default.issued, 0
        for _ in executor.pictures.pieces(picture):
            queued.append(card.default.issued)
            most = max(most, card.default.issued - card.default.done)
        assert card.default.issued - issued > 10 * most, "the whole tower"
        assert most <= max(after - before for before, after in itertools.pairwise(queued)) * 2


def test_a_picture_without_room_fails_its_own_request_only(large: Path) -> None:
    with emulated() as card, started(card, f"{large}", **LONG) as engine:
        card.values, card.most_allocated = False, None
        torch.cuda.empty_cache()
        others = torch.empty(torch.cuda.mem_get_info()[0] - (4 << 20), dtype=torch.uint8, device="cuda")
        core = engine.core
        core.submit(shown(core))
        core.submit(Request(request_id="text", prompt_tokens=[3, 4], sampling=structs.replace(GREEDY, max_tokens=40)))
        ends: dict[str, TokenEvent] = {}
        while core.has_work:
            ends |= {event.request_id: event for event in core.step() if event.finish_reason}
        assert core.failure is None
        assert (ends["text"].finish_reason, ends["shown"].finish_reason) == ("length", "error")
        assert ends["shown"].own_fault
        assert re.search(rf"a picture of {SIDE * SIDE} patches does not fit .*lower", ends["shown"].error or "")
        del others
        core.audit()
        again = shown(core)
        assert [len(tokens) for tokens in answered(core, [again])] == [STEPS], "its memory is free again"


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
