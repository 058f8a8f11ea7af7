"""Experts that a tool left stacked and quantised: codes and scales have the experts' number in front.

llm-compressor writes Granite's so, in fp8 and int8 by rows and in int4 by groups; transformers writes any
family's so in fp8 by blocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint
from tests.fixtures.quantised_forms import FORMS, Form, Tensors, fp8_of, is_converted
from tests.unit.models.test_forms import experts_stacked
from tests.unit.models.test_quantised_forms import CLOSE, load, logits
from weft.errors import CheckpointError
from weft.models.loading import load_model
from weft.tensor.weights.tiles import serves_coded


def write_stacked(source: str, directory: Path, form: Form, *, flipped: bool = False) -> tuple[Path, Path]:
    """(checkpoint ``source`` in ``form``, its values). ``flipped``: scales of other experts."""
    quantised = copy_checkpoint(checkpoint(source), directory / "q", quantization_config=form.config)
    plain = copy_checkpoint(checkpoint(source), directory / "p")
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in (tensors if source == "granite_moe" else experts_stacked(tensors)).items():
        if tensor.ndim == 3 and "conv" not in name:
            each = [form.quantise(name, matrix) for matrix in tensor]
            values[name] = torch.stack([value for _, value in each])
            for part in each[0][0]:
                stacked = torch.stack([made[part] for made, _ in each])
                stored[part] = stacked.flip(0) if flipped and part.endswith(form.scale) else stacked
            stored.pop(f"{name}_shape", None)
        elif is_converted(name, tensor):
            made, values[name] = form.quantise(name, tensor)
            stored |= made
        else:
            stored[name] = values[name] = tensor
    for path, parts in ((quantised, stored), (plain, values)):
        save_file({name: one.contiguous() for name, one in parts.items()}, path / "model.safetensors")
    return quantised, plain


def fp8_rows(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    made, values = fp8_of(name, matrix)
    return {part: one.view(-1, 1) if one.ndim == 1 else one for part, one in made.items()}, values


FP8_BY_ROWS = Form(
    {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
        },
    },
    fp8_rows,
    "_scale",
    "float32",
)
STACKED = {**FORMS, "fp8_rows": FP8_BY_ROWS}
CASES = [
    ("granite_moe", "int8_rows"),
    ("granite_moe", "int8_groups"),
    ("granite_moe", "packed_int4"),
    ("granite_moe", "packed_int4_zeros"),
    ("granite_moe", "fp8_rows"),
    ("granite_moe", "mxfp4"),
    ("qwen3_5_moe", "fp8"),
    ("qwen3_next", "fp8"),
]


@pytest.mark.parametrize(("source", "form"), CASES)
def test_stacked_experts_have_the_logits_of_their_values(source: str, form: str, tmp_path: Path) -> None:
    quantised, plain = write_stacked(source, tmp_path, STACKED[form])
    loaded = load(quantised)
    assert loaded.warnings == ()
    truth = logits(load(plain))
    torch.testing.assert_close(logits(loaded), truth, **CLOSE)
    wrong, _ = write_stacked(source, tmp_path / "wrong", STACKED[form], flipped=True)
    assert (logits(load(wrong)) - truth).abs().max() > 100 * CLOSE["atol"]


def test_stacked_experts_in_fp8_have_the_logits_of_the_widened_model(tmp_path: Path) -> None:
    """Within what another order of sums does in bfloat16."""
    quantised, plain = write_stacked("granite_moe", tmp_path, FP8_BY_ROWS)
    loaded, truth = (load_model(path, dtype="bfloat16") for path in (quantised, plain))
    assert ("fp8" in loaded.weights_form) == serves_coded(torch.device("cpu"), torch.bfloat16)
    expected = logits(truth)
    near = 0.02 * float(expected.abs().max())
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=near)
    wrong, _ = write_stacked("granite_moe", tmp_path / "wrong", FP8_BY_ROWS, flipped=True)
    assert (logits(load_model(wrong, dtype="bfloat16")) - expected).abs().max() > 5 * near


def test_a_stack_with_scales_of_another_shape_is_named(tmp_path: Path) -> None:
    quantised, _ = write_stacked("granite_moe", tmp_path, FORMS["packed_int4"])
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.input_linear.weight_scale"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"input_linear\.weight_scale has shape \[6, 63, 2\]") as caught:
        load(quantised)
    assert "\n" not in str(caught.value)
