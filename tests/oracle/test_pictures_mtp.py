"""The head for multi-token prediction behind pictures: it turns by their places as the trunk does.

The truth is a layer of transformers' Qwen3.5 with the head's weights, at the positions that transformers
works out of pixels' grids.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.vision_checkpoints import (
    prepared,
    reference_inputs,
    token_kinds,
    vision_checkpoint,
    vision_reference,
)
from tests.oracle.serving import Serving
from tests.oracle.test_engine_store import disk_store
from tests.oracle.test_pictures import BIG, CLIP, SAMPLING, TURNING, Seeing, answers, seeing
from weft.costs.rows import RowCosts
from weft.models.loading import LoadedModel, load_model
from weft.runner.mtp import HeadRunner
from weft.runner.pictures import PictureRows
from weft.speculation.speculator import Speculator

LAYER = 1
"""Of the trunk: its first layer of attention, whose weights the head has too."""
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
of_turning = pytest.mark.parametrize("name", TURNING)


@functools.cache
def head_weights(name: str) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(4)
    [file] = vision_checkpoint(name).glob("*.safetensors")
    mark = f"layers.{LAYER}."
    weights = {
        f"layers.0.{tensor.split(mark)[1]}": values.clone()
        for tensor, values in load_file(file).items()
        if "language_model" in tensor and mark in tensor
    }
    for norm in NORMS:
        weights[f"{norm}.weight"] = 0.3 * torch.randn(64, generator=noise)
    weights["fc.weight"] = torch.randn(64, 128, generator=noise) * 128**-0.5
    return weights


@functools.cache
def with_head(name: str, place: Path) -> LoadedModel:
    shutil.copytree(vision_checkpoint(name), place / name)
    file = place / name / "model.safetensors"
    head = {f"mtp.{tensor}": values for tensor, values in head_weights(name).items()}
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    return load_model(place / name, mtp=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@torch.no_grad()
def first_drafts(name: str, case: Seeing, size: tuple[int, ...], tokens: list[int]) -> list[int]:
    """What the head drafts behind each token but the last."""
    model: Any = vision_reference(name)
    head, text = head_weights(name), model.model.language_model

    def norm(x: torch.Tensor, of: str) -> torch.Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * (1 + head[f"{of}.weight"])

    ids = torch.tensor([tokens])
    given = reference_inputs(name, [prepared(name, *size)])
    given["mm_token_type_ids"] = token_kinds(model, ids)
    hidden = model.model(input_ids=ids, **given, use_cache=False).last_hidden_state[:, :-1]
    positions, _ = model.model.get_rope_index(
        ids, given["mm_token_type_ids"], given.get("image_grid_thw"), given.get("video_grid_thw")
    )
    joined = torch.cat((norm(text.embed_tokens(ids[:, 1:]), NORMS[0]), norm(hidden, NORMS[1])), -1)
    x = joined @ head["fc.weight"].T
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    layer = text.layers[LAYER]
    assert hasattr(layer, "self_attn")
    x = layer(x, position_embeddings=text.rotary_emb(x, positions[:, :, :-1]), attention_mask=mask)
    x = x[0] if isinstance(x, tuple) else x
    return model.lm_head(norm(x, NORMS[2]))[0].argmax(-1).tolist()  # type: ignore[no-any-return]


class Listening(Speculator):
    """No draft is worth a window."""

    def __init__(self) -> None:
        super().__init__(("mtp",), costs=RowCosts({1: 1.0, 2: 100.0}))
        self.offered: list[tuple[int, ...]] = []
        assert self._head is not None
        self._head.drafts = lambda sequences, costs: 1  # type: ignore[method-assign]

    def offer(self, key: int, tokens: Any, chances: Any) -> None:
        self.offered.append(tuple(tokens))
        super().offer(key, tokens, chances)


CASES = ((40, BIG, 40), (70, CLIP, -1))
"""(tokens before it, a picture or a video, tokens behind it): none behind, its last token is a row."""


def offered(name: str, place: Path, case: Seeing, **named: Any) -> list[int]:
    source = Listening()
    engine = Serving("", model=with_head(name, place), drafter=source, **named)
    engine.run([case.tokens], SAMPLING, pictures=[case.pictures])
    return [drafts[0] for drafts in source.offered]


@of_turning
@pytest.mark.parametrize(("before", "size", "behind"), CASES)
@pytest.mark.parametrize("step_tokens", [1024, 65])
def test_drafts_are_those_of_transformers_layers(
    name: str, before: int, size: tuple[int, ...], behind: int, step_tokens: int, place: Path
) -> None:
    case = seeing(name, before, (size,), behind, seed=7)
    known = [*case.tokens, *case.truth.tokens]
    expected = first_drafts(name, case, size, known)[len(case.tokens) - 1 :]
    drafts = offered(name, place, case, step_tokens=step_tokens)
    assert drafts == expected[: len(drafts)]
    assert len(drafts) >= 20
    assert len(set(expected)) > 3


@of_turning
def test_drafts_at_other_positions_are_noticed(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: vllm #54498 put back. The head turns by the length of the sequence."""
    case = seeing(name, 40, (BIG,), 40, seed=7)
    right = offered(name, place, case)
    run = HeadRunner.run

    def wrong(self: HeadRunner, plan: Any, inputs: Any, *more: Any) -> Any:
        return run(self, plan, dataclasses.replace(inputs, turns=None), *more)

    monkeypatch.setattr(HeadRunner, "run", wrong)
    monkeypatch.setattr(PictureRows, "turns_at", lambda self, rows, positions: None)
    assert offered(name, place, case) != right


def likely() -> Speculator:
    """Weights of the head are noise, and noise is rarely right: its drafts count as likely."""
    free = Speculator(("mtp",), costs=RowCosts({1: 1.0, 64: 1.001}), head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})
    assert free._head is not None
    free._head.drafts = lambda sequences, costs: 3  # type: ignore[method-assign]
    chances = free._head.chances.of("")
    chances.survivals = lambda proposal: [0.9] * len(proposal.tokens)  # type: ignore[method-assign]
    return free


@of_turning
def test_a_head_changes_no_token_of_an_answer_about_a_picture(name: str, place: Path) -> None:
    free = likely()
    engine = Serving("", model=with_head(name, place), drafter=free, cache=True)
    for before, size, behind in CASES * 2:
        answers(engine, [seeing(name, before, (size,), behind, seed=7)])
    assert free.stats().drafted > 10


@of_turning
def test_a_head_drafts_behind_pictures_out_of_the_store(name: str, place: Path, tmp_path: Path) -> None:
    """Another engine reads the prefix with its rows from disk; the head's keys come with it."""
    for wanted in (False, True):
        free = likely()
        engine = Serving(
            "", model=with_head(name, place), drafter=free, cache=True, store=lambda one: disk_store(tmp_path, one)
        )
        for before, size, behind in CASES:
            [answer] = answers(engine, [seeing(name, before, (size,), behind, seed=7)])
            assert (answer.cached_tokens > 60) == wanted  # type: ignore[attr-defined]
        assert free.stats().drafted > 5
        engine.core.close()
