"""Towers against transformers: rows of pictures, spellings of tensors, bits that depend on nothing else."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.vision_checkpoints import (
    VISION_CHECKPOINTS,
    load_vision_reference,
    prepared,
    reference_inputs,
    reference_rows,
    vision_checkpoint,
    vision_reference,
)
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import prompt
from weft.errors import CheckpointError
from weft.families import read_architecture
from weft.files import read_json
from weft.images.picture import Picture, Tile
from weft.models.loading import LoadedModel, load_model
from weft.models.vision import encoder
from weft.models.vision.encoder import VisionEncoder
from weft.planning.weights import count_weights, form_of

SIZES = ((20, 20), (64, 64), (90, 41), (41, 90), (150, 17), (200, 120), (120, 200), (300, 90), (256, 256))
"""(width, height): one tile of several grids; 2 to 4 tiles with a thumbnail."""
TOLERANCE = 1e-4


def encode_whole(encoder: VisionEncoder, picture: Picture) -> torch.Tensor:
    """All pieces, one after the other."""
    pieces = encoder.encode(picture)
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            rows: torch.Tensor = end.value
            return rows


@functools.cache
def loaded(name: str) -> LoadedModel:
    return load_model(vision_checkpoint(name))


def tower_of(model: LoadedModel) -> VisionEncoder:
    assert model.model.vision is not None
    return model.model.vision


def picture(width: int, height: int, name: str = "lfm2_vl") -> Picture:
    return prepared(name, width, height)


def distance(rows: torch.Tensor, truth: torch.Tensor) -> float:
    assert rows.shape == truth.shape
    return float((rows.float() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", VISION_CHECKPOINTS)
def test_rows_of_a_picture_equal_those_of_transformers(name: str, size: tuple[int, int]) -> None:
    seen = picture(*size, name)
    rows = encode_whole(tower_of(loaded(name)), seen)
    assert rows.shape == (seen.rows, 64)
    assert distance(rows, reference_rows(name, seen)) < TOLERANCE


def test_the_sizes_have_tiles_and_grids_of_many_kinds() -> None:
    counts = {len(picture(*size).tiles) for size in SIZES}
    assert {1, 3, 5} <= counts
    assert len({(tile.rows, tile.columns) for size in SIZES for tile in picture(*size).tiles}) > 5


def _transposed(tile: Tile) -> Tile:
    order = torch.arange(len(tile.patches)).view(tile.rows, tile.columns).t().flatten().numpy()
    return dataclasses.replace(tile, patches=tile.patches[order])


def _turned(tile: Tile) -> Tile:
    return dataclasses.replace(tile, rows=tile.columns, columns=tile.rows)


@pytest.mark.parametrize("change", [_transposed, _turned])
def test_patches_in_another_order_are_noticed(change: Callable[[Tile], Tile]) -> None:
    seen = picture(90, 41)
    spoiled = dataclasses.replace(seen, tiles=tuple(map(change, seen.tiles)))
    rows = encode_whole(tower_of(loaded("lfm2_vl")), spoiled)
    assert distance(rows, reference_rows("lfm2_vl", seen)) > 100 * TOLERANCE


def test_tiles_in_another_order_are_noticed() -> None:
    seen = picture(200, 120)
    spoiled = dataclasses.replace(seen, tiles=(seen.tiles[1], seen.tiles[0], *seen.tiles[2:]))
    rows = encode_whole(tower_of(loaded("lfm2_vl")), spoiled)
    assert distance(rows, reference_rows("lfm2_vl", seen)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["lfm2_vl", "lfm3_vl"])
def test_bits_are_the_same_whatever_is_encoded_between_the_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "PIECE_PATCHES", 16)
    tower, one, other = tower_of(loaded(name)), picture(200, 120, name), picture(90, 41, name)
    alone = encode_whole(tower, one)
    pieces, between, count = tower.encode(one), tower.encode(other), 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            rows = end.value
            break
        count += 1
        if next(between, "ended") == "ended":
            between = tower.encode(other)
    assert torch.equal(rows, alone)
    assert count > 3 * 3 * len(one.tiles), "a layer of a tile is several pieces"
    assert distance(rows, reference_rows(name, one)) < TOLERANCE


@pytest.mark.parametrize("name", ["lfm2_vl", "lfm3_vl"])
def test_bfloat16_is_as_near_as_that_of_transformers(name: str) -> None:
    seen = picture(90, 41, name)
    rows = encode_whole(tower_of(load_model(vision_checkpoint(name), "bfloat16")), seen)
    truth = reference_rows(name, seen)
    rounded = load_vision_reference(vision_checkpoint(name), dtype=torch.bfloat16)
    given = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in reference_inputs(name, [seen]).items()
    }
    with torch.inference_mode():
        [theirs] = rounded.get_image_features(**given, return_dict=True).pooler_output
    assert rows.dtype == torch.bfloat16
    assert distance(rows, truth) < 1.5 * distance(theirs, truth) < 0.06


@pytest.mark.parametrize("name", ["lfm2_vl", "lfm3_vl"])
def test_the_text_part_is_that_of_transformers(name: str) -> None:
    tokens = prompt(37)
    [logits] = ModelDriver(loaded(name).model, sequences=1, length=64).step((0, tokens))
    with torch.inference_mode():
        truth = vision_reference(name)(input_ids=torch.tensor([tokens])).logits[0]
    assert float((logits - truth).abs().max()) < TOLERANCE


SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "a release": (("model.vision_tower.", "model.vision_tower.vision_model."),),
    "an older save": (
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.language_model.", "language_model.model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    "a bare tower": (("model.vision_tower.", "model.vision_model."),),
}


def respelled(directory: Path, changes: tuple[tuple[str, str | None], ...]) -> Path:
    """A copy whose tensors have other names; None leaves them out."""
    shutil.copytree(vision_checkpoint("lfm2_vl"), directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    for old, new in changes:
        for name in [name for name in tensors if name.startswith(old)]:
            tensor = tensors.pop(name)
            if new is not None:
                tensors[new + name.removeprefix(old)] = tensor
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_releases_are_read(spelling: str, tmp_path: Path) -> None:
    model = load_model(respelled(tmp_path, SPELLINGS[spelling]))
    assert model.warnings == ()
    seen = picture(90, 41)
    assert torch.equal(encode_whole(tower_of(model), seen), encode_whole(tower_of(loaded("lfm2_vl")), seen))


def test_a_text_part_alone_has_no_tower(tmp_path: Path) -> None:
    alone = load_model(
        respelled(tmp_path / "files", (("model.vision_tower.", None), ("model.multi_modal_projector.", None)))
    )
    assert alone.model.vision is None
    assert alone.model.architecture.vision is None
    assert load_model(checkpoint("lfm2")).model.vision is None
    directory = respelled(tmp_path / "config", ())
    config = json.loads((directory / "config.json").read_text())
    del config["vision_config"]
    (directory / "config.json").write_text(json.dumps(config))
    without = load_model(directory)
    assert without.model.vision is None
    assert any("Skipped the vision tower" in line for line in without.warnings)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    name = "model.vision_tower.encoder.layers.1.mlp.fc1.weight"
    with pytest.raises(CheckpointError, match=f"tensor {name} of shape .* is missing"):
        load_model(respelled(tmp_path, ((name, None),)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "siglip2_vision_model"),
        ("layer_types", ["conv", "mamba", "conv", "conv"]),
        ("layer_types", ["conv"]),
        ("conv_kernel_size", 4),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 5),
        ("temporal_patch_size", 1),
        ("rope_parameters", {"rope_type": "yarn"}),
    ],
)
def test_what_lfm3_does_not_serve_of_a_tower_is_named(key: str, value: object) -> None:
    config = read_json(vision_checkpoint("lfm3_vl") / "config.json")
    with pytest.raises(CheckpointError, match=f"vision_config.{key}"):
        read_architecture(config | {"vision_config": config["vision_config"] | {key: value}})


@pytest.mark.parametrize(
    ("key", "value"), [("vision_feature_layer", -2), ("projector_hidden_act", "relu"), ("downsample_factor", 3)]
)
def test_what_is_not_served_is_named(tmp_path: Path, key: str, value: object) -> None:
    directory = respelled(tmp_path, ())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=key):
        load_model(directory)


@pytest.mark.parametrize("name", VISION_CHECKPOINTS)
def test_a_plan_counts_the_tower(name: str) -> None:
    config = read_json(vision_checkpoint(name) / "config.json")
    architecture = read_architecture(config)
    plan = count_weights(architecture, architecture, 1, form_of(config, "float32", None))
    assert plan.rank_bytes == loaded(name).weights_bytes
    text = dataclasses.replace(architecture, vision=None)
    assert (
        plan.rank_bytes - plan.parts["vision"]
        == count_weights(text, text, 1, form_of(config, "float32", None)).rank_bytes
    )
