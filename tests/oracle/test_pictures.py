"""Prompts with pictures through the engine, against transformers: the same tokens whatever else happens.

The truth is transformers' whole model on pixels, for each tower. ``seeing`` is a prompt of text, pictures and
more text. Qwen3.5 turns by the places of pictures (M-RoPE), so the same compositions prove its positions.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

import weft.pictures
from tests.fixtures.vision_checkpoints import (
    SEEING,
    drawn_frames,
    greedy_of_pixels,
    prepared,
    vision_settings,
    vision_start,
)
from tests.oracle.serving import Serving, Truth, assert_equal_to_truth, distance
from tests.oracle.test_engine_store import disk_store
from tests.oracle.test_vision import loaded
from tests.server.scripted_engine import _FreeRows
from tests.support.graph_steps import EagerCapture
from tests.support.pictures import drawn, encoded
from weft.images.decoding import ImageLimits
from weft.images.video import prepare as prepare_video
from weft.images.worker import read_picture
from weft.pictures import Turns
from weft.request import PICTURE_KINDS, PlacedPicture, Request, Resumption, SamplingParams
from weft.runner.pictures import PictureRows
from weft.schedule.plan import StepPlan
from weft.speculation.speculator import Speculator

STEPS = 24
TOLERANCE = 1e-4
SAMPLING = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
BIG, TALL, SMALL, FLAT = (200, 120), (120, 200), (64, 64), (41, 90)
CLIP = (60, 50, 5)
"""A video: its frames at last."""
TURNING = tuple(name for name in SEEING if name.startswith("qwen"))
READING_VIDEOS = (*TURNING, "lfm3_vl")
of_each = pytest.mark.parametrize("name", SEEING)
of_turning = pytest.mark.parametrize("name", TURNING)


class Seeing(NamedTuple):
    name: str
    tokens: list[int]
    pictures: list[PlacedPicture]
    truth: Truth


@functools.cache
def seeing(name: str, before: int, sizes: tuple[tuple[int, ...], ...], behind: int, *, seed: int = 0) -> Seeing:
    """``before`` and ``behind``: tokens of text around the pictures, whose tiles have a token of text behind
    each; with -1 the last has none."""
    vision = loaded(name).model.architecture.vision
    assert vision is not None
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, 390, (count,), generator=generator).tolist()

    tokens, placed = text(before), []
    shown = [prepared(name, *size) for size in sizes]
    for one in shown:
        places = []
        for rows in (part for part in one.text if isinstance(part, int)):
            places.append((len(tokens), rows))
            token = vision.picture_tokens[PICTURE_KINDS.index(one.kind)]
            tokens += [*[token] * rows, *text(1)]
        placed.append(PlacedPicture(digest=one.digest, places=places, data=one.to_bytes()))
    tokens = tokens[:behind] if behind < 0 else tokens + text(behind)
    [proposed] = serving(name).run([tokens], SAMPLING, pictures=[placed])
    return Seeing(name, tokens, placed, Truth(tokens, *greedy_of_pixels(name, tokens, shown, STEPS, proposed.tokens)))


def serving(name: str, **named: object) -> Serving:
    return Serving("", model=loaded(name), **named)  # type: ignore[arg-type]


@functools.cache
def cases(name: str) -> list[Seeing]:
    """Videos are among them where the model reads any."""
    last, mixed = ((CLIP,), (FLAT, CLIP, TALL)) if name in READING_VIDEOS else ((FLAT,), (FLAT, TALL, FLAT))
    return [
        seeing(name, 70, (BIG,), 9, seed=1),
        seeing(name, 3, (SMALL,), 60, seed=2),
        seeing(name, 130, last, -1, seed=3),
        seeing(name, 20, mixed, 12, seed=6),
    ]


def answers(engine: Serving, asked: list[Seeing], **named: object) -> list[Truth]:
    results = engine.run([case.tokens for case in asked], SAMPLING, pictures=[case.pictures for case in asked], **named)  # type: ignore[arg-type]
    assert_equal_to_truth(results, [case.truth for case in asked])
    return results  # type: ignore[return-value]


@of_each
@pytest.mark.parametrize("step_tokens", [1024, 100, 65])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_about_a_picture_is_that_of_transformers(name: str, step_tokens: int, overlap: bool) -> None:
    """Chunks end before, inside of and behind pictures (imp #1184: a second chunk began at image row 0;
    mlx-vlm #1621: at position 0)."""
    engine = serving(name, step_tokens=step_tokens, overlap=overlap)
    answers(engine, cases(name), stagger_steps=2)
    assert len({case.truth.tokens[0] for case in cases(name)}) > 1


@of_each
def test_an_answer_through_graphs_is_that_of_transformers(name: str) -> None:
    answers(serving(name, capture=EagerCapture(), remote=True), cases(name), stagger_steps=2)


@of_each
def test_hits_skip_the_picture_only_if_it_is_the_same(name: str) -> None:
    """fastllm #750: the picture was skipped on a hit of the text. vllm #43587: no hits with pictures."""
    first, other = seeing(name, 70, (BIG,), 9, seed=1), seeing(name, 70, (TALL,), 9, seed=1)
    assert first.tokens[:70] == other.tokens[:70]
    engine = serving(name, cache=True)
    for case, least, most in (
        (first, 0, 0),
        (first, len(first.tokens) - 64, len(first.tokens)),
        (other, 0, 63),
        (first, len(first.tokens) - 64, len(first.tokens)),
    ):
        [answer] = answers(engine, [case])
        assert least <= answer.cached_tokens <= most  # type: ignore[attr-defined]
    assert engine.core.pictures.stats().encoded == 2


GROWING = ((BIG, TALL), (BIG, TALL, FLAT), (BIG, TALL, FLAT, BIG))


def hits_of_growing(name: str) -> list[int]:
    """Cached tokens of a conversation to which pictures are added."""
    engine = serving(name, cache=True)
    turns = [seeing(name, 10, sizes, 0, seed=8) for sizes in GROWING]
    for turn, before in zip(turns[1:], turns, strict=False):
        assert turn.tokens[: len(before.tokens)] == before.tokens
    return [answers(engine, [turn])[0].cached_tokens for turn in turns]  # type: ignore[attr-defined]


@of_each
def test_a_conversation_that_pictures_are_added_to_is_a_hit(name: str) -> None:
    """vllm #43587: no hits as pictures were added."""
    first, second, third = hits_of_growing(name)
    assert first == 0
    at, rows = seeing(name, 10, GROWING[0], 0, seed=8).pictures[0].places[-1]
    assert third >= second >= at + rows, "it is behind the first picture"


def test_keys_that_are_new_in_each_prompt_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: vllm #43587 put back. Keys are of the prompt, and not of the picture."""
    right, numbers = weft.pictures._stream, itertools.count()
    monkeypatch.setattr("weft.pictures._stream", lambda seed, count: right(seed + str(next(numbers)).encode(), count))
    assert max(hits_of_growing("lfm2_vl")) <= 10


def resumed(case: Seeing, pictures: list[PlacedPicture], count: int) -> list[int]:
    """What an engine that is told the first ``count`` tokens of the answer adds to them."""
    engine = serving(case.name, cache=True)
    engine.core.submit(
        Request(
            request_id="a",
            prompt_tokens=case.tokens,
            sampling=SAMPLING,
            pictures=pictures,
            resumption=Resumption(answers={0: case.truth.tokens[:count]}),
        )
    )
    tokens: list[int] = []
    while engine.core.has_work:
        for event in engine.core.step():
            tokens += event.tokens
    return tokens


@of_each
def test_an_answer_goes_on_in_another_engine(name: str) -> None:
    """As after kill -9 (``tests/fleet/test_pictures.py``). maclocal-api #42: positions were read from the
    state of a cache, which a new engine does not have."""
    for case in cases(name)[3:], [seeing(name, 20, (FLAT, TALL, FLAT), 12, seed=6)]:
        for count in (1, 13):
            assert resumed(case[0], case[0].pictures, count) == case[0].truth.tokens[count:]
    case, settings = case[0], vision_settings(name)
    noise = [read_picture(encoded(drawn("noise", *size)), settings, ImageLimits()) for size in (FLAT, TALL, FLAT)]
    others = [
        PlacedPicture(digest=other.digest, data=other.to_bytes(), places=one.places)
        for other, one in zip(noise, case.pictures, strict=True)
    ]
    assert resumed(case, others, 1) != case.truth.tokens[1:], "the control: the pictures decide the answer"


@pytest.mark.parametrize("name", READING_VIDEOS)
def test_videos_that_differ_in_their_last_frame_share_nothing(name: str) -> None:
    """Nor does a video share rows with the picture that its frames show."""
    first = seeing(name, 70, (CLIP,), 70, seed=2)
    engine, frames = serving(name, cache=True), drawn_frames(*CLIP)
    shown = vision_start(name).videos
    assert shown is not None
    frames[-1] = drawn("noise", *CLIP[:2])
    other = prepare_video(frames, [at / 2 for at in range(CLIP[2])], shown)
    [before] = first.pictures
    placed = PlacedPicture(digest=other.digest, data=other.to_bytes(), places=before.places)
    [proposed] = serving(name).run([first.tokens], SAMPLING, pictures=[[placed]])
    greedy = greedy_of_pixels(name, first.tokens, [other], STEPS, proposed.tokens)
    second = Seeing(name, first.tokens, [placed], Truth(first.tokens, *greedy))
    for case, least, most in ((first, 0, 0), (second, 0, 64), (first, 100, 200), (second, 100, 200)):
        [answer] = answers(engine, [case])
        assert least <= answer.cached_tokens <= most  # type: ignore[attr-defined]
    assert first.truth.tokens != second.truth.tokens
    still = prepare_video([frames[0]] * 2, [0.0, 0.5], shown)
    assert still.digest != prepared(name, *CLIP[:2]).digest


@of_each
def test_preemptions_compute_a_picture_again(name: str) -> None:
    asked = [*cases(name)[:3], seeing(name, 20, ((90, 41),), 30, seed=4), seeing(name, 40, (SMALL,), 90, seed=5)]
    arena = serving(name).arena
    frames = 4 if name in TURNING else 16
    engine = serving(name, memory_bytes=frames * arena.frame_bytes, max_model_len=300, cache=True)
    results = answers(engine, asked * 2)
    assert sum(answer.preemptions for answer in results) > 0  # type: ignore[attr-defined]


@of_each
def test_speculation_changes_no_token_of_an_answer_about_a_picture(name: str) -> None:
    """vllm #54498: slots of drafts were wrong with pictures."""
    drafter = Speculator(("prediction", "suffix", "tree"), costs=_FreeRows())
    engine = serving(name, cache=True, drafter=drafter)
    drafter._tree = engine.core.memory.prefix_tree
    for case in cases(name)[:3] * 2:
        answers(engine, [case], predictions=[case.truth.tokens])
    assert sum(one.accepted for one in engine.core.stats().speculation.sources.values()) > STEPS


@of_each
def test_a_stored_prefix_with_a_picture_is_read_again(name: str, tmp_path: Path) -> None:
    for wanted in (False, True):
        engine = serving(name, cache=True, store=lambda one: disk_store(tmp_path, one))
        [answer] = answers(engine, [cases(name)[0]])
        assert (answer.cached_tokens > 120) == wanted  # type: ignore[attr-defined]
        engine.core.close()


def off(name: str, case: Seeing, *, step_tokens: int = 1024, cache: bool = False) -> float:
    """How far an engine's logits are from the truth, the second time that it is asked."""
    engine = serving(name, step_tokens=step_tokens, cache=cache)
    for _ in range(1 + cache):
        [answer] = engine.run([case.tokens], SAMPLING, pictures=[case.pictures])
    return float(distance(answer, case.truth))


@of_each
def test_rows_by_the_place_in_a_chunk_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: imp #1184 put back. Every chunk begins at row 0 of the picture."""
    right, case = PictureRows.of_step, seeing(name, 40, (BIG,), 40, seed=7)

    def wrong(self: PictureRows, plan: StepPlan) -> tuple[npt.NDArray[np.int64], torch.Tensor] | None:
        embedded = right(self, plan)
        if embedded is None:
            return None
        rows = torch.cat([rows for _, rows in next(iter(self._places.values()))])
        return embedded[0], rows[: len(embedded[0])]

    monkeypatch.setattr(PictureRows, "of_step", wrong)
    assert off(name, case) < TOLERANCE, "one chunk is right: the control spoils second ones alone"
    assert off(name, case, step_tokens=65) > 100 * TOLERANCE


@of_turning
def test_positions_that_begin_again_in_a_chunk_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: mlx-vlm #1621 put back. A second chunk turns from position 0 on."""
    right = Turns.at

    def wrong(self: Turns, start: int, end: int) -> npt.NDArray[np.int64]:
        return right(self, 0, end - start) if end - start > 1 else right(self, start, end)

    monkeypatch.setattr(Turns, "at", wrong)
    case = cases(name)[0]
    assert off(name, case) < TOLERANCE
    assert off(name, case, step_tokens=65) > 100 * TOLERANCE


@of_turning
def test_a_delta_that_a_hit_loses_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: mlx-vlm #1621 and maclocal-api #42 put back. Behind a hit positions are the cache's
    length."""
    right = PictureRows.apply

    def wrong(self: PictureRows, plan: StepPlan) -> None:
        right(self, plan)
        for admission in plan.admissions:
            if int(plan.starts[plan.rows.tolist().index(admission.row)]):
                self._turns.pop(admission.row, None)

    monkeypatch.setattr(PictureRows, "apply", wrong)
    case = cases(name)[0]
    assert off(name, case) < TOLERANCE
    assert off(name, case, cache=True) > 100 * TOLERANCE


@of_turning
def test_plain_positions_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PictureRows, "turn", lambda self, rows: False)
    assert off(name, cases(name)[0]) > 100 * TOLERANCE


def test_turns_are_those_of_transformers() -> None:
    spans = [(2, 2, 3), (9, 4, 2), (17, 1, 5)]
    turns, count = Turns(spans), 26
    known = turns.at(0, count)
    text = [
        at for at in range(count) if not any(first <= at < first + rows * columns for first, rows, columns in spans)
    ]
    assert (known[:, text] == known[0, text]).all()
    assert known[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert known[0].tolist() == [0, 1, *[2] * 6, 5, *[6] * 8, *[10] * 5, *range(15, 19)]
    assert turns.delta == known[0, -1] + 1 - count
    for start in range(count):
        assert (turns.at(start, count) == known[:, start:]).all()
        assert turns.plain(start) == (start >= 22)
