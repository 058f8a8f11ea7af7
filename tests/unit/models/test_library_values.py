"""Matrices as other libraries store them have the values that those libraries read, bit for bit.

``tests.support.library_values`` made the files, with the libraries.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint, load_reference, make_checkpoint
from tests.fixtures.quantised_forms import FORMS, Tensors, mxfp4, write
from tests.oracle.model_driver import ModelDriver
from tests.support.library_values import DIRECTORY
from tests.unit.models.test_forms import experts_stacked
from tests.unit.models.test_quantised_forms import CLOSE, Q_PROJ, load, logits
from weft.errors import CheckpointError
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.forms import stored_form
from weft.models.safetensors_header import read_header
from weft.tensor.weights.quantized import Codes, in_tiles

FILES = sorted(path.stem for path in DIRECTORY.glob("*.safetensors"))


def read(file: Path, *, keeps_fp8: bool, spoil: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """(what weft reads, what the library reads). ``spoil``: the tensor whose first byte is another one."""
    with safe_open(file, "pt") as opened:
        config, dtype = (opened.metadata()[key] for key in ("quantization_config", "dtype"))
    tensors = load_file(file)
    if spoil:
        tensors[spoil].view(torch.uint8).view(-1)[0] ^= 2
    values = tensors.pop("values")
    form = stored_form({"quantization_config": json.loads(config)}, read_header(file))
    form.keeps_fp8 = keeps_fp8

    def ask(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        assert tuple(tensors[name].shape) == shape
        return tensors[name]

    made = form.read(ask, "x.weight", tuple(values.shape))
    if isinstance(made, Codes):
        torch.testing.assert_close(in_tiles(made).dense(), made.dense(), rtol=0, atol=0)
        made = made.dense()
    return made.to(getattr(torch, dtype.removeprefix("torch."))).float(), values


@pytest.mark.parametrize("keeps_fp8", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_values_are_those_of_the_library(name: str, keeps_fp8: bool) -> None:
    made, values = read(DIRECTORY / f"{name}.safetensors", keeps_fp8=keeps_fp8)
    # bitsandbytes divides by 127 behind the product, codes have one scale: two roundings of float32.
    torch.testing.assert_close(made, values, rtol=2.4e-7 if name == "int8-bitsandbytes" else 0, atol=0)


def test_one_bit_of_a_stored_matrix_changes_its_values() -> None:
    """The control of the test above."""
    for name, tensor in (
        ("nvfp4-modelopt", "x.weight"),
        ("nf4-bitsandbytes", "x.weight"),
        ("mxfp4-compressed", "x.weight_scale"),
        ("gptq4-auto-round", "x.qzeros"),
    ):
        made, values = read(DIRECTORY / f"{name}.safetensors", keeps_fp8=False, spoil=tensor)
        assert not torch.equal(made, values), name


def test_experts_in_the_layout_of_gpt_oss_have_the_logits_of_their_values(tmp_path: Path) -> None:
    quantised = copy_checkpoint(checkpoint("qwen3_next"), tmp_path / "q", quantization_config={"quant_method": "mxfp4"})
    plain = copy_checkpoint(checkpoint("qwen3_next"), tmp_path / "p")
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in experts_stacked(load_file(quantised / "model.safetensors")).items():
        stored[name] = values[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del stored[name]
            made, values[name] = mxfp4("_blocks", "_scales")(name, tensor)
            stored |= made
            stored[f"{name}_blocks"] = made[f"{name}_blocks"].unflatten(-1, (-1, 16))
    assert any(name.endswith("_blocks") for name in stored)
    for path, held in ((quantised, stored), (plain, values)):
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path / "model.safetensors")
    loaded = load(quantised)
    assert "int4" in loaded.weights_form
    assert not loaded.warnings
    other = load(plain)
    # The kernels of codes and of floats add up in other orders; the weights below are equal to the bit.
    torch.testing.assert_close(logits(loaded), logits(other), rtol=5e-4, atol=5e-4)
    block, truth = (model.model.layers[0].feed_forward for model in (loaded, other))
    assert isinstance(block, ExpertsBlock)
    assert isinstance(truth, ExpertsBlock)
    assert torch.equal(block.gate_up.dense(), truth.gate_up.dense())  # type: ignore[union-attr, operator]


def test_a_checkpoint_of_gpt_oss_has_the_logits_of_transformers_over_its_values(tmp_path: Path) -> None:
    """Blocks as released: rows of gate and up take turns, each matrix has its rows first. Values as
    transformers saves them: transposed."""
    quantised = make_checkpoint(tmp_path / "q", "gpt_oss", intermediate_size=64)
    plain = copy_checkpoint(quantised, tmp_path / "p")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    )
    stored = load_file(quantised / "model.safetensors")
    values = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        made, exact = mxfp4("_blocks", "_scales")(name, stored.pop(name).transpose(1, 2).contiguous())
        values[name] = exact.transpose(1, 2)
        stored |= made | {f"{name}_blocks": made[f"{name}_blocks"].unflatten(-1, (-1, 16))}
    for path, held in ((quantised, stored), (plain, values)):
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path / "model.safetensors")
    loaded = load(quantised)
    assert "int4" in loaded.weights_form
    assert not loaded.warnings
    tokens = list(range(3, 43))
    with torch.inference_mode():
        truth = load_reference(plain)(torch.tensor([tokens])).logits[0]
    [coded], [floats] = (
        ModelDriver(each.model, sequences=1, length=64).step((0, tokens)) for each in (loaded, load(plain))
    )
    torch.testing.assert_close(floats, truth, rtol=0, atol=1e-4)
    torch.testing.assert_close(coded, truth, rtol=0, atol=1e-3)
    other = {
        **values,
        "model.layers.0.mlp.experts.gate_up_proj": values["model.layers.0.mlp.experts.gate_up_proj"].flip(-1),
    }  # the control: rows in another order
    save_file({name: tensor.contiguous() for name, tensor in other.items()}, plain / "model.safetensors")
    [wrong] = ModelDriver(load(plain).model, sequences=1, length=64).step((0, tokens))
    assert (wrong - truth).abs().max() > 0.01


def test_settings_of_modelopt_are_found_in_their_own_file(tmp_path: Path) -> None:
    quantised, plain = write("qwen3_5", tmp_path, FORMS["nvfp4_modelopt"])
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    inside = config | {"quantization_config": settings | {"quant_method": "modelopt"}}
    (quantised / "config.json").write_text(json.dumps(inside))
    torch.testing.assert_close(logits(load(quantised)), logits(load(plain)), **CLOSE)
    (quantised / "config.json").write_text(json.dumps(config))
    (quantised / "hf_quant_config.json").write_text(json.dumps(settings))
    torch.testing.assert_close(logits(load(quantised)), logits(load(plain)), **CLOSE)


def broken(source: str, tmp_path: Path, change: dict[str, torch.Tensor | None]) -> str:
    """The error of a checkpoint in the form ``source`` with other tensors."""

    def spoil(tensors: Tensors) -> None:
        for name, tensor in change.items():
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor

    quantised, _ = write("qwen3_5", tmp_path, FORMS[source], spoil=spoil)
    with pytest.raises(CheckpointError) as caught:
        load(quantised)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_tensors_are_named_in_one_line(tmp_path: Path) -> None:
    q = Q_PROJ.removesuffix("weight")
    shape = (256, 64)
    cases: list[tuple[str, dict[str, torch.Tensor | None], list[str]]] = [
        ("mxfp4", {f"{Q_PROJ}_scale": torch.full((shape[0], 2), 255, dtype=torch.uint8)}, ["_scale", "255"]),
        ("nvfp4", {f"{Q_PROJ}_global_scale": torch.zeros(1)}, ["_global_scale", "finite"]),
        ("nvfp4_modelopt", {f"{Q_PROJ}_scale_2": None}, ["_scale_2", "missing"]),
        ("int8_bitsandbytes", {f"{q}SCB": torch.ones(3)}, ["SCB", "[3]", f"[{shape[0]}]"]),
        (
            "auto_round",
            {f"{q}qweight": torch.zeros(16, shape[0], dtype=torch.int32)},
            [q.removesuffix("."), "8 bits", "auto-round", "4"],
        ),
        (
            "nf4",
            {f"{Q_PROJ}.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)},
            ["quant_state", "JSON"],
        ),
        ("fp8_modelopt", {Q_PROJ: torch.zeros(shape[0], 32, dtype=torch.uint8)}, ["q_proj", "fp8"]),
    ]
    for index, (source, change, words) in enumerate(cases):
        found = broken(source, tmp_path / str(index), change)
        assert all(word in found for word in words), (source, found)
