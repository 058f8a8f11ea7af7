"""The part "served" of the first run on a GPU, as far as a CPU goes: its checkpoints load, a server answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_checkpoint, gpu_first_run, gpu_served
from weft.adapters import read_adapter
from weft.models.loading import load_model


@pytest.mark.parametrize("form", ["bf16", "fp8", "int4"])
def test_a_checkpoint_of_every_part_loads(form: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    arguments = ["every-part", str(directory), "--layers", "2", "--head", "--adapters", "2", "--form", form]
    assert gpu_checkpoint.main(arguments) == 0
    loaded = load_model(directory, mtp=True)
    assert loaded.model.vision is not None
    assert getattr(loaded.model, "mtp", None) is not None
    assert {layer.kind for layer in loaded.spec.layers} >= {"attention", "gated_delta"}
    assert {"bf16": "bfloat16", "fp8": "fp8", "int4": "int4"}[form] in loaded.weights_form
    assert loaded.model.vision.largest().rows < loaded.spec.max_positions
    for number in range(2):
        assert read_adapter("a", tmp_path / f"model-adapter-{number}").rank == gpu_checkpoint.RANK


def test_codes_in_fp8_are_the_matrix_within_their_steps() -> None:
    matrix = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = gpu_checkpoint.in_fp8("model.layers.0.mlp.up_proj.weight", matrix)
    codes, scales = made.values()
    assert list(made)[1].endswith(".weight_scale_inv")
    widened = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert (widened - matrix.float()).abs().max() <= matrix.float().abs().max() / 16
    assert list(gpu_checkpoint.in_fp8("model.embed_tokens.weight", matrix)) == ["model.embed_tokens.weight"]


def test_a_server_answers_with_the_tokens_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_served.main(["--device", "cpu", "--only", "plain"])
    results = [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines() if line.startswith("@")]
    assert results[0] == {"number": 0, "begins": "plain"}
    assert results[1].get("error") is None
    assert results[1]["tokens"] == gpu_served.TOKENS * len(gpu_served.LENGTHS)
    assert results[1]["equal_tokens"] >= gpu_served.TOKENS


def test_a_way_that_does_not_start_leaves_the_others_their_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_served, "compared", lambda way, *_: 1 / 0 if way.form == "fp8" else {"tokens": 1})
    gpu_served.main(["--device", "cpu", "--only", "fp8", "int4", "--after", "1"])
    results = [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines() if line.startswith("@")]
    assert [one.get("error", one.get("tokens")) for one in results if "name" in one] == [
        "ZeroDivisionError: division by zero",
        1,
    ]


def test_the_least_known_part_comes_first_and_each_has_a_command() -> None:
    assert list(gpu_first_run.SHARES_S)[:2] == ["machine", "served"]
    for part in gpu_first_run.SHARES_S:
        assert len(gpu_first_run.command_of(part, ["--device", "cpu"], 3)) > 2
    assert gpu_first_run.command_of("27b", ["--geometry", "other"], 0)[-6:-3] == ["--batch", "1", "16"]
    assert gpu_first_run.command_of("served", [], 3)[-2:] == ["--after", "3"]
