"""``weft quantize``: the copy has the values that its report tells of, and appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint
from tests.fixtures.quantised_forms import FORMS, write
from tests.unit.models.test_quantised_forms import CLOSE, load, logits
from weft.cli.main import main
from weft.errors import CheckpointError
from weft.models import quantized_copy
from weft.models.quantized_copy import MatrixError, write_quantized


def plain_of(copied: Path, source: str, directory: Path) -> Path:
    """The values that a copy's tensors mean, by the description of compressed-tensors alone."""
    from safetensors.torch import save_file

    plain, stored = copy_checkpoint(checkpoint(source), directory), load_file(copied / "model.safetensors")
    values = {}
    for name, truth in load_file(plain / "model.safetensors").items():
        if f"{name}_scale" not in stored:
            values[name] = stored[name]
            continue
        scales = stored[f"{name}_scale"]
        if name in stored:
            values[name] = stored[name].float() * scales
            continue
        words, bits = stored[f"{name}_packed"], 32 * stored[f"{name}_packed"].shape[1] // truth.shape[1]
        each = [(words >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)]
        codes = torch.stack(each, -1).flatten(1)
        assert stored[f"{name}_shape"].tolist() == list(truth.shape)
        groups = scales.repeat_interleave(truth.shape[1] // scales.shape[1], 1)
        values[name] = (codes - (1 << (bits - 1))).float() * groups
    save_file(values, plain / "model.safetensors")
    return plain


@pytest.mark.parametrize(("source", "form", "held"), [
    ("qwen3_5", "int4", "int4"), ("granite", "w8a8", "int8"), ("jamba", "int4", "int4"),
    ("qwen3_5", "int8", "int8")])
def test_a_copy_is_the_model_of_its_values_and_says_their_errors(source: str, form: quantized_copy.CopyForm,
                                                                 held: str, tmp_path: Path) -> None:
    errors = write_quantized(checkpoint(source), tmp_path / "out", form)
    loaded, plain = load(tmp_path / "out"), plain_of(tmp_path / "out", source, tmp_path / "plain")
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


def test_a_run_that_is_broken_off_leaves_no_out_and_goes_on(tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException): ...

    def killed(one: MatrixError) -> None:
        if seen.append(one.name) or len(seen) == 5:
            raise Killed
    seen: list[str | None] = []
    out = tmp_path / "out"
    with pytest.raises(Killed):
        write_quantized(checkpoint("qwen3_5"), out, "int4", killed)
    assert not out.exists()
    assert (tmp_path / "out.partial").exists()
    write_quantized(checkpoint("qwen3_5"), out, "int4")
    again = tmp_path / "again"
    write_quantized(checkpoint("qwen3_5"), again, "int4")
    first, second = (load_file(path / "model.safetensors") for path in (out, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised, _ = write("qwen3_5", tmp_path, FORMS["awq"])
    with pytest.raises(CheckpointError, match=r"quantised already \(awq\)"):
        write_quantized(quantised, tmp_path / "out", "int4")
    with pytest.raises(CheckpointError, match="is there already"):
        write_quantized(checkpoint("qwen3_5"), tmp_path, "int4")
    assert main(["quantize", str(checkpoint("mamba")), str(tmp_path / "out"), "--form", "int8"]) == 2
    assert "no matrix has columns in whole groups of 128; --form w8a8" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert main(["quantize", str(checkpoint("qwen3_5")), str(tmp_path / "out"), "--form", "q4_k"]) == 2
    assert "--form q4_k" in capsys.readouterr().err
    assert main(["quantize", str(checkpoint("qwen3_5")), str(tmp_path / "out"), "--form", "int4"]) == 0
    assert "matrices in int4" in capsys.readouterr().out
