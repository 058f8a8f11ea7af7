"""Prompts with pictures through the engine, against transformers: the same tokens whatever else happens.

The truth is transformers' whole model on pixels. ``seeing`` is a prompt of text, a picture, and more text.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.fixtures.vision_checkpoints import vision_reference
from tests.oracle.serving import Serving, Truth, assert_equal_to_truth, distance
from tests.oracle.test_engine_store import disk_store
from tests.oracle.test_vision import loaded, picture, settings_of
from tests.server.scripted_engine import _FreeRows
from weft.request import PlacedPicture, SamplingParams
from weft.runner.pictures import PictureRows
from weft.schedule.plan import StepPlan
from weft.speculation.speculator import Speculator
from weft.tensor.inputs import EmbeddedRows

NAME = "lfm2_vl"
STEPS = 24
TOLERANCE = 1e-4
FAMILY = "lfm2"
SAMPLING = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


class Seeing(NamedTuple):
    tokens: list[int]
    pictures: list[PlacedPicture]
    truth: Truth


def image_token() -> int:
    vision = loaded(NAME).model.architecture.vision
    assert vision is not None
    return vision.image_token_id


@functools.cache
def seeing(before: int, size: tuple[int, int], behind: int, *, seed: int = 0) -> Seeing:
    """``before`` and ``behind``: tokens of text around the picture's tiles, which stand one token apart."""
    one = picture(*size)
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        return torch.randint(3, 400, (count,), generator=generator).tolist()
    tokens, places = text(before), []
    for rows in (part for part in one.text if isinstance(part, int)):
        places.append((len(tokens), rows))
        tokens += [*[image_token()] * rows, *text(1)]
    tokens += text(behind)
    placed = PlacedPicture(digest=one.digest, places=places, data=one.to_bytes())
    return Seeing(tokens, [placed], _truth(tokens, size))


@torch.inference_mode()
def _truth(tokens: list[int], size: tuple[int, int]) -> Truth:
    model, settings, one = vision_reference(NAME), settings_of(NAME), picture(*size)
    most = max(len(tile.patches) for tile in one.tiles)
    values = torch.zeros(len(one.tiles), most, one.tiles[0].patches.shape[1])
    mask = torch.zeros(len(one.tiles), most, dtype=torch.int32)
    for number, tile in enumerate(one.tiles):
        patches = torch.tensor(tile.patches) * settings.rescale_factor
        values[number, :len(patches)] = (patches - settings.mean[0]) / settings.std[0]
        mask[number, :len(patches)] = 1
    shapes = torch.tensor([[tile.rows, tile.columns] for tile in one.tiles])
    known, rows = list(tokens), []
    for _ in range(STEPS):
        logits = model(input_ids=torch.tensor([known]), pixel_values=values, spatial_shapes=shapes,
                       pixel_attention_mask=mask, use_cache=False).logits[0].float()
        rows.append(logits[-1])
        known.append(int(logits[-1].argmax()))
    return Truth(tokens, known[len(tokens):], torch.stack(rows), logits[:len(tokens)])


def serving(**named: object) -> Serving:
    return Serving(FAMILY, model=loaded(NAME), **named)


CASES = [seeing(70, (200, 120), 9, seed=1), seeing(3, (64, 64), 60, seed=2), seeing(130, (41, 90), 1, seed=3)]


def answers(engine: Serving, cases: list[Seeing], **named: object) -> list[Truth]:
    results = engine.run([case.tokens for case in cases], SAMPLING,
                         pictures=[case.pictures for case in cases], **named)
    assert_equal_to_truth(results, [case.truth for case in cases])
    return results


@pytest.mark.parametrize("step_tokens", [1024, 100, 65])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_about_a_picture_is_that_of_transformers(step_tokens: int, overlap: bool) -> None:
    """Chunks end before, inside of and behind pictures (imp #1184: a second chunk began at image row 0)."""
    engine = serving(step_tokens=step_tokens, overlap=overlap)
    answers(engine, CASES, stagger_steps=2)
    assert len({case.truth.tokens[0] for case in CASES}) > 1


def test_hits_skip_the_picture_only_if_it_is_the_same() -> None:
    """fastllm #750: the picture was skipped on a hit of the text. vllm #43587: no hits with pictures."""
    first, other = seeing(70, (200, 120), 9, seed=1), seeing(70, (120, 200), 9, seed=1)
    assert first.tokens[:70] == other.tokens[:70]
    engine = serving(cache=True)
    for case, least, most in ((first, 0, 0), (first, len(first.tokens) - 64, len(first.tokens)),
                              (other, 0, 63), (first, len(first.tokens) - 64, len(first.tokens))):
        [answer] = answers(engine, [case])
        assert least <= answer.cached_tokens <= most
    assert engine.core.pictures.stats().encoded == 2


def test_preemptions_compute_a_picture_again() -> None:
    cases = [*CASES, seeing(20, (90, 41), 30, seed=4), seeing(40, (64, 64), 90, seed=5)]
    arena = serving().arena
    engine = serving(memory_bytes=16 * arena.frame_bytes, max_model_len=300, cache=True)
    results = answers(engine, cases * 2)
    assert sum(answer.preemptions for answer in results) > 0


def test_speculation_changes_no_token_of_an_answer_about_a_picture() -> None:
    """vllm #54498: slots of drafts were wrong with pictures."""
    drafter = Speculator(("prediction", "suffix", "tree"), costs=_FreeRows())
    engine = serving(cache=True, drafter=drafter)
    drafter._tree = engine.core.memory.prefix_tree
    for case in CASES * 2:
        answers(engine, [case], predictions=[case.truth.tokens])
    assert sum(one.accepted for one in engine.core.stats().speculation.sources.values()) > STEPS


def test_a_stored_prefix_with_a_picture_is_read_again(tmp_path: Path) -> None:
    for wanted in (False, True):
        engine = serving(cache=True, store=lambda one: disk_store(tmp_path, one))
        [answer] = answers(engine, [CASES[0]])
        assert (answer.cached_tokens > 120) == wanted
        engine.core.close()


def test_rows_by_the_place_in_a_chunk_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: imp #1184 put back."""
    right = PictureRows.of_step

    def wrong(self: PictureRows, plan: StepPlan) -> EmbeddedRows | None:
        embedded = right(self, plan)
        if embedded is None:
            return None
        first = next(iter(self._places.values()))[0][1]
        return EmbeddedRows(embedded.index_N, first[:1].expand_as(embedded.rows_ND))
    monkeypatch.setattr(PictureRows, "of_step", wrong)
    engine = serving(step_tokens=65)
    [answer] = engine.run([CASES[0].tokens], SAMPLING, pictures=[CASES[0].pictures])
    assert distance(answer, CASES[0].truth) > 100 * TOLERANCE
