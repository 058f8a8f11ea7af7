"""Checkpoints from strangers: each broken or hostile file is one clear line that names it, before weights
are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.errors import CheckpointError
from weft.files import JSON_DEPTH_MAX
from weft.models.loading import load_model

DOWN = "model.layers.1.mlp.down_proj.weight"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A complete checkpoint, to break."""
    return copy_checkpoint(checkpoint("qwen3_5"), tmp_path / "stranger")


def refused(directory: Path, *words: str) -> str:
    """The engine does not start; the error is one line of bounded length with ``words``."""
    with pytest.raises(CheckpointError) as caught:
        assemble(EngineConfig(model=str(directory), memory="8MiB", threads=1))
    message = caught.value.message
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message
    assert len(message) < 2000
    return message


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors")


def change_header(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The same data behind another header."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def poison(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN][3, 5] = value

    return change


# ---------------------------------------------------------------------- values that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_refused_by_its_tensor_s_name(
    directory: Path, value: float, dtype: torch.dtype
) -> None:
    rewrite(directory, lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))
    rewrite(directory, poison(value))
    refused(directory, DOWN, "NaN or infinite", "debug.allow_nonfinite")


def test_one_infinity_of_each_sign_and_large_finite_values_are_told_apart(directory: Path) -> None:
    """Their sum is NaN; that of values near the largest float overflows, and is no reason to refuse."""
    rewrite(directory, lambda tensors: tensors[DOWN].fill_(3e38))
    load_model(directory)
    infinite = torch.tensor([[1.0, -1.0]]) * float("inf")
    rewrite(directory, lambda tensors: tensors[DOWN][:1, :2].copy_(infinite))
    refused(directory, DOWN)


def test_who_allows_it_gets_a_warning_with_the_name(directory: Path) -> None:
    rewrite(directory, poison(float("nan")))
    loaded = load_model(directory, allow_nonfinite=True)
    assert any(DOWN in line and "NaN" in line for line in loaded.warnings)
    assert load_model(checkpoint("qwen3_5"), allow_nonfinite=True).warnings == ()


# ---------------------------------------------------------------------- headers that lie


def test_tensors_that_overlap_are_refused_by_both_names(directory: Path) -> None:
    up = DOWN.replace("down", "up")

    def overlap(header: dict[str, Any]) -> None:
        header[up]["data_offsets"] = header[DOWN]["data_offsets"]

    change_header(directory, overlap)
    refused(directory, "model.safetensors", up, DOWN, "overlap")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header[DOWN].update(shape=[-64, -96]),
        lambda header: header[DOWN].update(shape=[10**30, 10**30]),
        lambda header: header[DOWN].update(data_offsets=[0, 10**30]),
        lambda header: header[DOWN].update(data_offsets=[float("inf"), float("nan")]),
        lambda header: header[DOWN].update(dtype="F4"),
        lambda header: header[DOWN].update(dtype=["F32"]),
        lambda header: header.update({DOWN: None}),
    ],
)
def test_offsets_shapes_and_dtypes_that_cannot_be_are_refused(
    directory: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    change_header(directory, change)
    refused(directory, "model.safetensors")


def test_a_header_that_is_too_deep_is_refused(directory: Path) -> None:
    text = DEEP.encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    refused(directory, "model.safetensors", "levels")


# ---------------------------------------------------------------------- JSON and text

NAMES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    "content",
    [DEEP, '{"a":' * 100_000, '{"a": ' + "[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX + "}", "{", "[]", "7", "", "\x00"],
    ids=["deep", "deep and cut", "just too deep", "cut", "array", "number", "empty", "zero"],
)
@pytest.mark.parametrize("name", NAMES)
def test_json_that_cannot_be_read_is_refused_by_its_file_s_name(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content)
    refused(directory, str(directory / name))


@pytest.mark.parametrize("name", [*NAMES, "chat_template.jinja"])
def test_a_file_that_is_no_text_is_refused_by_its_name(directory: Path, name: str) -> None:
    (directory / name).write_bytes(bytes(range(256)))
    refused(directory, str(directory / name), "UTF-8")


@pytest.mark.parametrize(("name", "size"), [("config.json", 17 << 20), ("chat_template.jinja", 5 << 20)])
def test_a_file_that_is_too_long_is_refused_and_read_no_further(directory: Path, name: str, size: int) -> None:
    with (directory / name).open("wb") as file:
        file.truncate(size)
    refused(directory, str(directory / name), "longer than")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**15),
        ("vocab_size", 2**62),
        ("num_attention_heads", 10**12),
        ("max_position_embeddings", 10**400),
        ("head_dim", -1),
        ("rope_theta", 10**400),
        ("layer_types", "x" * 10**6),
    ],
)
def test_a_configuration_of_monstrous_numbers_is_refused_at_once(tmp_path: Path, key: str, value: object) -> None:
    directory = copy_checkpoint(checkpoint("qwen3"), tmp_path / "monstrous", **{key: value})
    refused(directory)


# ---------------------------------------------------------------------- links


@pytest.mark.parametrize("name", [*NAMES, "chat_template.jinja", "model.safetensors"])
def test_a_link_out_of_the_directory_is_refused_and_one_inside_is_not(directory: Path, name: str) -> None:
    path = directory / name
    if not path.exists():
        path.write_text("{{ messages }}")
    outside = directory.parent / "elsewhere"
    path.rename(outside)
    path.symlink_to(outside)
    refused(directory, str(path), "link out of")
    path.unlink()
    inside = directory / "blob.bin"
    outside.rename(inside)
    path.symlink_to(inside)
    assemble(EngineConfig(model=str(directory), memory="8MiB", threads=1)).core.close()


def test_an_index_cannot_name_files_elsewhere(directory: Path) -> None:
    outside = directory.parent / "stolen.safetensors"
    (directory / "model.safetensors").rename(outside)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {DOWN: "../stolen.safetensors"}}))
    refused(directory, "stolen.safetensors", "missing")
    (directory / "stolen.safetensors").symlink_to(outside)
    refused(directory, "stolen.safetensors", "link out of")


def test_the_hub_s_own_cache_may_link_to_its_blobs_and_nowhere_else(directory: Path) -> None:
    repository = directory.parent / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "1234", repository / "blobs"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    directory.rename(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / ".." / "blobs" / str(number))
    assemble(EngineConfig(model=str(snapshot), memory="8MiB", threads=1)).core.close()
    secret = repository.parent / "secret"
    secret.write_text("{{ messages }}")
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    (snapshot / "chat_template.jinja").symlink_to(secret)
    refused(snapshot, "chat_template.jinja", "link out of")


def test_a_pipe_and_a_loop_of_links_are_refused_without_waiting(directory: Path) -> None:
    path = directory / "config.json"
    path.unlink()
    os.mkfifo(path)
    refused(directory, "config.json")
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to(directory / "tokenizer.json")
    path.unlink()
    path.write_bytes((checkpoint("qwen3_5") / "config.json").read_bytes())
    refused(directory, "tokenizer.json")


# ---------------------------------------------------------------------- before weights are read


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_small_file_is_refused_before_any_weight_is_read(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(*args: object, **kwargs: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("weft.models.loading.TensorReader", reading)
    whole = copy_checkpoint(directory, directory.parent / "whole")
    with pytest.raises(AssertionError, match="was read"):  # the same trap on a good checkpoint
        load_model(whole)
    (directory / name).write_bytes(b"\xff")
    refused(directory, name)


def test_a_checkpoint_without_a_tokenizer_is_refused_before_any_weight_is_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "tokenizer.json").unlink()
    monkeypatch.setattr("weft.models.loading.TensorReader", None)
    refused(directory, "tokenizer.json", "missing")
