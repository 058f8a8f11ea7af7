"""``weft quantize``: the copy has the values that its report tells of, and appears whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.fixtures.checkpoints import checkpoint, copy_checkpoint
from tests.fixtures.quantised_forms import FORMS, write
from tests.unit.models.test_forms import experts_stacked, reformed
from tests.unit.models.test_quantised_forms import CLOSE, load, logits
from weft.cli.main import main
from weft.errors import CheckpointError
from weft.models.stored_values import MappedFiles
from weft_tools.quantize import quantized_copy
from weft_tools.quantize.quantized_copy import MatrixError, write_quantized

SAVED_AS_STACKS = ("granite_moe", "gpt_oss", "gemma4_moe", "zaya", "inkling")


def plain_of(copied: Path, source: Path, directory: Path) -> Path:
    """The values that a copy's tensors mean, by the description of compressed-tensors alone."""
    from safetensors.torch import save_file

    plain, stored = copy_checkpoint(source, directory), load_file(copied / "model.safetensors")
    values = {}
    for name, tensor in stored.items():
        if name.endswith("weight_packed"):
            base, words = name.removesuffix("_packed"), tensor
            rows, columns = stored[f"{base}_shape"].tolist()
            bits = 32 * words.shape[1] // columns
            each = [(words >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)]
            codes = torch.stack(each, -1).flatten(1)
            assert codes.shape == (rows, columns)
            scales = stored[f"{base}_scale"]
            groups = scales.repeat_interleave(columns // scales.shape[1], 1)
            values[base] = (codes - (1 << (bits - 1))).float() * groups
        elif f"{name}_scale" in stored:
            values[name] = tensor.float() * stored[f"{name}_scale"]
        elif not name.endswith(("weight_scale", "weight_shape")):
            values[name] = tensor
    save_file(values, plain / "model.safetensors")
    return plain


def with_stacks(name: str, directory: Path) -> Path:
    """Checkpoint ``name`` with one tensor for all experts of a layer, as hub releases have them."""
    return checkpoint(name) if name in SAVED_AS_STACKS else reformed(name, directory, experts_stacked)


def each_expert(tensors: dict[str, torch.Tensor], source: str) -> dict[str, torch.Tensor]:
    """Matrices of each expert, by the names of packed checkpoints; rows of gpt-oss take turns in columns."""
    out = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(
            r"(.*?)(\.experts)?\.(gate_up_proj|down_proj|input_linear\.weight|"
            r"output_linear\.weight)",
            name,
        )
        if match is None or tensor.ndim != 3 or "shared_experts" in name:
            out[name] = tensor
            continue
        names = ("gate", "up") if match[3] in ("gate_up_proj", "input_linear.weight") else ("down",)
        for number, expert in enumerate(tensor):
            halves = (
                expert.chunk(len(names))
                if source != "gpt_oss"
                else [expert.T[place :: len(names)] for place in range(len(names))]
            )
            out |= {
                f"{match[1]}.experts.{number}.{part}_proj.weight": half
                for part, half in zip(names, halves, strict=True)
            }
    return out


@pytest.mark.parametrize(
    ("source", "form", "held"),
    [("qwen3_5", "int4", "int4"), ("granite", "w8a8", "int8"), ("jamba", "int4", "int4"), ("qwen3_5", "int8", "int8")],
)
def test_a_copy_is_the_model_of_its_values_and_says_their_errors(
    source: str, form: quantized_copy.CopyForm, held: str, tmp_path: Path
) -> None:
    errors = write_quantized(checkpoint(source), tmp_path / "out", form)
    loaded = load(tmp_path / "out")
    plain = plain_of(tmp_path / "out", checkpoint(source), tmp_path / "plain")
    assert held in loaded.weights_form
    assert not loaded.warnings
    torch.testing.assert_close(logits(loaded), logits(load(plain)), **CLOSE)
    truth, values = (load_file(path / "model.safetensors") for path in (checkpoint(source), plain))
    for one in errors:
        distance = float((values[one.name] - truth[one.name]).norm() / truth[one.name].norm())
        assert one.error == pytest.approx(distance, rel=1e-3)
        assert 0 < one.error < (0.15 if form == "int4" else 0.02)
        assert one.copied_bytes < one.stored_bytes / 3
    left = ("in_proj_a", "in_proj_b", "x_proj", "dt_proj", "embed", "lm_head", "conv1d")
    assert not any(part in one.name for one in errors for part in left)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("granite_moe", "int4"),
        ("granite_moe", "w8a8"),
        ("qwen3_5_moe", "int4"),
        ("qwen3_5_moe", "w8a8"),
        ("qwen3_next", "int4"),
        ("gpt_oss", "w8a8"),
        ("gemma4_moe", "w8a8"),
        ("zaya", "w8a8"),
        ("inkling", "w8a8"),
    ],
)
def test_a_tensor_of_all_experts_becomes_the_matrices_of_each(
    source: str, form: quantized_copy.CopyForm, tmp_path: Path
) -> None:
    stacked = with_stacks(source, tmp_path / "stacked")
    truth = load_file(stacked / "model.safetensors")
    stacks = {
        name
        for name, tensor in truth.items()
        if tensor.ndim == 3 and "conv" not in name and "shared_experts" not in name
    }
    apart = each_expert(truth, source)
    errors = {one.name: one for one in write_quantized(stacked, tmp_path / "out", form)}
    plain = plain_of(tmp_path / "out", stacked, tmp_path / "plain")
    values, loaded = load_file(plain / "model.safetensors"), load(tmp_path / "out")
    assert stacks
    assert not stacks & values.keys()
    assert values.keys() == apart.keys()
    assert not loaded.warnings
    torch.testing.assert_close(logits(loaded), logits(load(plain)), **CLOSE)
    of_experts = [name for name in apart if ".experts." in name and name.endswith("weight")]
    rounds = form == "w8a8" or source != "gpt_oss"
    assert {*of_experts} <= errors.keys() if rounds else not {*of_experts} & errors.keys()
    for name, one in errors.items():
        distance = float((values[name] - apart[name]).norm() / apart[name].norm())
        assert one.error == pytest.approx(distance, rel=1e-3)  # 1.4 if rows were those of another matrix
        assert 0 < one.error < (0.15 if form == "int4" else 0.02)
    for name in apart.keys() - errors.keys():  # routers, biases, embeddings, ...
        assert torch.equal(values[name], apart[name])
    left = ("router", "mlp.gate.", "shared_expert_gate", "bias", "in_proj_a", "in_proj_b", "embed", "conv1d")
    assert not any(part in name for part in left for name in errors)


def test_experts_whose_columns_are_no_whole_groups_are_apart_and_as_they_were(tmp_path: Path) -> None:
    errors = write_quantized(checkpoint("gpt_oss"), tmp_path / "out", "int4")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    truth = each_expert(load_file(checkpoint("gpt_oss") / "model.safetensors"), "gpt_oss")
    down, gate = (f"model.layers.0.mlp.experts.5.{part}_proj.weight" for part in ("down", "gate"))
    assert torch.equal(stored[down], truth[down])
    assert gate in {one.name for one in errors}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert down.removesuffix(".weight") in settings["ignore"]
    assert gate.removesuffix(".weight") not in settings["ignore"]


def test_one_expert_of_a_stack_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sizes = MappedFiles.read, []

    def noted(self: MappedFiles, *args: Any) -> torch.Tensor:
        tensor = read(self, *args)
        sizes.append(tensor.numel() * tensor.itemsize)
        return tensor

    monkeypatch.setattr(MappedFiles, "read", noted)
    write_quantized(checkpoint("granite_moe"), tmp_path / "out", "w8a8")
    truth = load_file(checkpoint("granite_moe") / "model.safetensors")
    experts = [tensor[0].numel() * 4 for tensor in truth.values() if tensor.ndim == 3 and len(tensor) == 6]
    matrices = [tensor.numel() * 4 for name, tensor in truth.items() if tensor.ndim == 2 and "emb" not in name]
    assert max(sizes) == max(matrices)
    assert max(experts) <= max(matrices) < 6 * max(experts)
    assert len(sizes) > 6 * 2 * 4


@pytest.mark.parametrize("form", ["int4", "w8a8"])
def test_a_copy_of_stacked_experts_is_planned_and_answers_as_its_values_do(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(checkpoint("granite_moe")), str(out), "--form", form]) == 0
    assert "  model.layers.3 " in capsys.readouterr().out
    assert main(["plan", str(out)]) == 0
    planned = capsys.readouterr().out
    assert "weights" in planned
    plain = plain_of(out, checkpoint("granite_moe"), tmp_path / "plain")
    answers = []
    for directory in (out, plain, checkpoint("granite_moe")):
        with weft.Engine(str(directory), memory="8MiB", quantize_inputs=False) as engine:
            [answer] = engine.generate("The river runs past", max_tokens=24, temperature=0.0)
            answers.append(answer.tokens)
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]  # the control: rounding is seen in such an answer


def test_the_report_has_a_line_for_each_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = write_quantized(checkpoint("qwen3_5"), tmp_path / "out", "int4")
    assert main(["quantize", str(checkpoint("qwen3_5")), str(tmp_path / "other"), "--form", "int4"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    layers = sorted({one.name.partition("layers.")[2].partition(".")[0] for one in errors})
    assert [line[0] for line in said] == [f"model.layers.{number}" for number in layers]
    for layer, whole, largest, name in said:
        own = {one.name.removeprefix(f"{layer}."): one for one in errors if one.name.startswith(f"{layer}.")}
        assert max(own.values(), key=lambda one: one.error) is own[name]
        assert largest == f"{own[name].error:.3%}"
        assert min(one.error for one in own.values()) < float(whole[:-1]) / 100 < own[name].error


@pytest.mark.parametrize(("source", "at"), [("qwen3_5", 5), ("granite_moe", 30)])
def test_a_run_that_is_broken_off_leaves_no_out_and_goes_on(source: str, at: int, tmp_path: Path) -> None:
    class Killed(BaseException): ...

    def killed(one: MatrixError) -> None:
        if seen.append(one.name) or len(seen) == at:
            raise Killed

    seen: list[str | None] = []
    out = tmp_path / "out"
    with pytest.raises(Killed):
        write_quantized(checkpoint(source), out, "int4", killed)
    assert not out.exists()
    assert (tmp_path / "out.partial").exists()
    write_quantized(checkpoint(source), out, "int4")
    again = tmp_path / "again"
    write_quantized(checkpoint(source), again, "int4")
    first, second = (load_file(path / "model.safetensors") for path in (out, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised, _ = write("qwen3_5", tmp_path, FORMS["awq"])
    with pytest.raises(CheckpointError, match=r"quantised already \(awq\)"):
        write_quantized(quantised, tmp_path / "out", "int4")
    with pytest.raises(CheckpointError, match="exists already"):
        write_quantized(checkpoint("qwen3_5"), tmp_path, "int4")
    assert main(["quantize", str(checkpoint("mamba")), str(tmp_path / "out"), "--form", "int8"]) == 2
    assert "no matrix has columns in whole groups of 128; --form w8a8" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert main(["quantize", str(checkpoint("qwen3_5")), str(tmp_path / "out"), "--form", "q4_k"]) == 2
    assert "--form q4_k" in capsys.readouterr().err
    assert main(["quantize", str(checkpoint("qwen3_5")), str(tmp_path / "out"), "--form", "int4"]) == 0
    assert "matrices in int4" in capsys.readouterr().out
