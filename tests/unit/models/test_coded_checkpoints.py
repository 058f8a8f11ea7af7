"""bfloat16 models in fp8, nf4 and fp4 on a CPU: the widened model's weights in the bytes of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.stored_forms import logits, more_forms, pack
from weft.models.loading import load_model
from weft.tensor.weights.tiles import serves_coded

FORMS = more_forms()


@pytest.mark.parametrize(
    ("family", "form", "held"),
    [
        ("qwen3_5", "fp8", "fp8"),
        ("qwen3_5", "fp8_modelopt", "fp8"),
        ("qwen3_5", "mxfp8", "fp8"),
        ("qwen3_5", "nf4_plain", "nf4"),
        ("qwen3_5", "fp4", "fp4"),
        ("lfm2", "nf4", "nf4"),
        ("granite", "fp8_quark", "fp8"),
        ("qwen3_next", "fp8_torchao", "fp8"),
        ("qwen3_next", "nf4_plain", "nf4"),
        ("falcon_h1", "nf4_plain", "nf4"),
    ],
)
def test_a_bfloat16_model_keeps_its_codes_and_has_the_widened_models_logits(
    family: str, form: str, held: str, tmp_path: Path
) -> None:
    quantised, plain = pack(family, FORMS[form], tmp_path)
    loaded, widened = (load_model(path, "bfloat16") for path in (quantised, plain))
    found, truth = logits(loaded), logits(widened)
    if not serves_coded(torch.device("cpu"), torch.bfloat16):  # no AVX-512: such weights are widened as they are read
        assert held not in loaded.weights_form
        assert torch.equal(found, truth)
        return
    assert held in loaded.weights_form
    assert held not in load_model(quantised, "float32").weights_form, "tiles of codes are bfloat16"
    size = (quantised / "model.safetensors").stat().st_size
    assert loaded.weights_bytes < (1.03 if form != "nf4" else 1.1) * size
    words = form in ("nf4", "nf4_plain", "fp4", "fp8_quark")  # four sums for each row of a matrix
    if words or family == "qwen3_next":  # small experts are multiplied by torch
        torch.testing.assert_close(found, truth, rtol=0.03, atol=0.03 * float(truth.abs().max()))
    else:
        assert torch.equal(found, truth)


def test_a_rounded_model_keeps_no_such_codes(tmp_path: Path) -> None:
    quantised, _ = pack("qwen3_5", FORMS["fp8"], tmp_path)
    assert "fp8" not in load_model(quantised, "bfloat16", quantize="int8").weights_form
