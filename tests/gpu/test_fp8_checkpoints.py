"""Checkpoints in fp8 stay in fp8 under the Triton kernels, and are the model of their widened values. So are
those in int4 whose columns lie by group.

In the interpreter only products with codes run as Triton kernels. The others take nearly all of its time, and
have tests of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import VOCAB_SIZE
from tests.fixtures.quantised_forms import FORMS, Form, Tensors, fp8, write
from tests.gpu.tolerances import COMPILED
from tests.oracle.model_driver import ModelDriver
from tests.oracle.serving import DEVICE
from weft.models import loading
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.loading import LoadedModel, load_model
from weft.tensor import gpu, native, op
from weft.tensor.weights.quantized import QuantizedWeight

KEPT = fp8(16, 32)
TOKENS = torch.randint(0, VOCAB_SIZE, (6,), generator=torch.Generator().manual_seed(7)).tolist()
REACHED = op._reached
FLOAT32 = {"rtol": 2e-3, "atol": 2e-3} if COMPILED else {"rtol": 1e-4, "atol": 1e-4}
"""Weights are the same numbers; sums have another order."""
BFLOAT16 = 0.1
"""Of the largest logit: each layer rounds, and the interpreter cuts off where a GPU rounds."""


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of a prompt."""
    [prefill] = ModelDriver(loaded.model, sequences=1, length=16).step((0, TOKENS))
    return prefill


def load(directory: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(directory, dtype, device=DEVICE)  # type: ignore[arg-type]


def holds_codes(argument: object) -> bool:
    return isinstance(argument, QuantizedWeight) and argument.codes.dtype == torch.uint8


@pytest.fixture(autouse=True)
def codes_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if gpu.INTERPRETED:
        monkeypatch.setattr(op, "_reached", lambda args: any(map(holds_codes, args)) and REACHED(args))
        monkeypatch.setattr(gpu, "fits", lambda first, *others: False)
    native.choose("torch")
    yield
    native.choose("auto")


def compressed_rows(name: str, matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (matrix.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (matrix / scales.float()).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scales}, codes.float() * scales.float()


def by_rows(inputs: object) -> Form:
    return Form(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                    "input_activations": inputs,
                }
            },
        },
        compressed_rows,
        "_scale",
        "float32",
    )


BY_ROWS = by_rows({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True})
WEIGHTS_ALONE = by_rows(None)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs in fp8 as on Hopper, on any machine. Other GPUs' kernels multiply the same codes."""
    monkeypatch.setattr(loading, "multiplies_fp8", lambda place: True)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("source", "form"), [("qwen3_next", KEPT), ("qwen3_5", BY_ROWS)])
def test_a_checkpoint_in_fp8_is_the_model_of_its_widened_values(source: str, form: Form, tmp_path: Path) -> None:
    """In float32, also where inputs of 16 bits are rounded to fp8."""
    quantised, plain = write(source, tmp_path, form)
    loaded, widened = load(quantised), load(plain)
    assert loaded.weights_form.split(", ") in (["float32", "fp8"], ["fp8"])
    assert "fp8" not in widened.weights_form
    want, got = logits(widened), logits(loaded)
    torch.testing.assert_close(got, want, **FLOAT32)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_the_control_another_scale_is_another_model(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith("_scale_inv"))
        tensors[name][0, 0] *= 1.5

    quantised, plain = write("qwen3_5", tmp_path, KEPT, spoil=spoil)
    got, want = (logits(load(path)) for path in (quantised, plain))
    assert (got - want).abs().max() > 10 * FLOAT32["atol"]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("form", "inputs"), [(KEPT, "as they are"), (BY_ROWS, "fp8"), (WEIGHTS_ALONE, "as they are")])
def test_in_bfloat16_too(form: Form, inputs: str, tmp_path: Path) -> None:
    """Rows of 128 columns and one scale meet inputs in fp8; blocks of 32 columns do not, nor does a
    checkpoint whose weights alone are in fp8."""
    quantised, plain = write("qwen3_5", tmp_path, form)
    loaded = load(quantised, "bfloat16")
    assert ("fp8 x fp8" in loaded.weights_form) == (inputs == "fp8")
    got, want = (logits(one).float() for one in (loaded, load(plain, "bfloat16")))
    assert (got - want).abs().max() < BFLOAT16 * want.abs().max()


def expert_weights(loaded: LoadedModel) -> list[Any]:
    blocks = [layer.feed_forward for layer in loaded.model.layers]
    return [weight for block in blocks if isinstance(block, ExpertsBlock) for weight in (block.gate_up, block.down)]


def test_the_bytes_of_a_matrix_are_those_of_its_file(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, KEPT)
    loaded = load(quantised)
    [held] = {
        id(layer.feed_forward.down.weight): layer.feed_forward.down.weight  # type: ignore[union-attr]
        for layer in loaded.model.layers[:1]
    }.values()
    assert isinstance(held, QuantizedWeight)
    assert held.codes.numel() == 64 * 96
    assert held.scales.shape == (4, 3, 1), "one for a tile of 16 rows and a block of columns"
    gpu.choose("torch")
    assert "fp8" not in load(quantised).weights_form, "the control: without the kernels it is widened"


def test_blocks_that_are_no_lines_of_columns_and_other_forms_are_widened(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, FORMS["fp8"])
    assert "fp8" not in load(quantised).weights_form
    kept, _ = write("qwen3_5", tmp_path / "kept", KEPT)
    rounded = load_model(kept, quantize="int8", device=DEVICE)
    assert "fp8" not in rounded.weights_form
    assert "int8" in rounded.weights_form


def test_experts_that_are_stored_as_one_tensor_are_those_that_are_stored_one_by_one(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_next", tmp_path, KEPT)
    path = quantised / "model.safetensors"
    want = expert_weights(load(quantised))
    tensors = load_file(path)
    blocks = {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}
    for end in ("", "_scale_inv"):
        for block in blocks:

            def every(part: str, block: str = block, end: str = end) -> torch.Tensor:
                return torch.stack(
                    [tensors.pop(f"{block}.{expert}.{part}_proj.weight{end}").view(torch.uint8) for expert in range(8)]
                )

            both = torch.cat([every("gate"), every("up")], dim=1)
            dtype = torch.float32 if end else torch.float8_e4m3fn
            tensors[f"{block}.gate_up_proj{end}"] = both.view(dtype)
            tensors[f"{block}.down_proj{end}"] = every("down").view(dtype)
    save_file(tensors, path)
    got = expert_weights(load(quantised))
    assert len(got) > 2
    for one, other in zip(got, want, strict=True):
        assert one.form == other.form == "fp8"
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scales, other.scales)


def test_columns_by_group_meet_inputs_in_that_order_and_experts_are_widened(tmp_path: Path) -> None:
    quantised, plain = write("qwen3_next", tmp_path, FORMS["gptq_ordered"])
    loaded = load(quantised)
    assert "int4" in loaded.weights_form
    assert all(isinstance(weight, torch.Tensor) for weight in expert_weights(loaded))
    qkv = next(
        layer.mixer.qkv
        for layer in loaded.model.layers  # type: ignore[union-attr]
        if hasattr(layer.mixer, "qkv")
    )
    assert isinstance(qkv.weight, QuantizedWeight)
    assert qkv.weight.order is not None
    want, got = logits(load(plain)), logits(loaded)
    torch.testing.assert_close(got, want, **FLOAT32)
    qkv.weight = replace(qkv.weight, order=qkv.weight.order.flip(0))
    assert (logits(loaded) - want).abs().max() > 10 * FLOAT32["atol"]
