"""Checkpoints quantised by other tools are the model of the values that their tensors mean."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import VOCAB_SIZE, checkpoint, copy_checkpoint
from tests.fixtures.quantised_forms import FORMS, Tensors, deepseek_v4, write
from tests.oracle.model_driver import ModelDriver
from tests.unit.models.test_forms import reformed
from weft.errors import CheckpointError
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.forms import stored_form
from weft.models.loading import LoadedModel, load_model
from weft.models.safetensors_header import StoredTensor
from weft.models.stored_values import TORCH_DTYPES
from weft.tensor import native
from weft.tensor.weights.quantized import Codes, in_tiles

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def logits(loaded: LoadedModel) -> torch.Tensor:
    tokens = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    [prefill] = (driver := ModelDriver(loaded.model, sequences=1, length=48)).step((0, tokens))
    return torch.cat([prefill, *driver.step((0, [5]))])


def load(directory: Path, **more: object) -> LoadedModel:
    return load_model(directory, quantize_inputs=False, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_checkpoint_has_the_logits_of_its_values(form: str, tmp_path: Path) -> None:
    quantised, plain = write("qwen3_5", tmp_path, FORMS[form])
    loaded = load(quantised)
    assert loaded.warnings == ()
    assert loaded.weights_form.split(", ")[0] in (FORMS[form].held, "float32")
    assert FORMS[form].held in loaded.weights_form
    torch.testing.assert_close(logits(loaded), logits(load(plain)), **CLOSE)


@pytest.mark.parametrize(
    ("source", "form"),
    [
        *(
            (source, form)
            for source in ("qwen3_next", "lfm2", "granite")
            for form in (
                "fp8",
                "int8_rows",
                "packed_int4_zeros",
                "awq",
                "auto_round_mixed",
                "mxfp4",
                "nvfp4_modelopt",
                "nf4",
            )
        ),
        ("gigachat3_5", "fp8"),
        ("kimi_k3", "mxfp4"),
    ],
)
def test_experts_and_other_families_are_read_in_the_same_forms(source: str, form: str, tmp_path: Path) -> None:
    quantised, plain = write(source, tmp_path, FORMS[form])
    torch.testing.assert_close(logits(load(quantised)), logits(load(plain)), **CLOSE)


def test_the_release_of_deepseek_v4_has_two_forms_in_one(tmp_path: Path) -> None:
    quantised, plain = write("deepseek_v4", tmp_path, deepseek_v4(48, 40))
    loaded = load(quantised)
    assert loaded.warnings == ()
    assert "int4" in loaded.weights_form
    wanted = logits(load(plain))
    torch.testing.assert_close(logits(loaded), wanted, **CLOSE)
    tensors = load_file(quantised / "model.safetensors")
    tensors["model.layers.1.ffn.experts.3.w1.scale"].view(torch.uint8).add_(2)
    save_file(tensors, quantised / "model.safetensors")
    assert (logits(load(quantised)) - wanted).abs().max() > 0.01


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_scale_changes_the_logits(form: str, tmp_path: Path) -> None:
    """The control of the tests above."""

    def spoil(tensors: Tensors) -> None:
        name = next(name for name in tensors if name.endswith(FORMS[form].scale))
        scales = tensors[name].float().flatten()
        scales[:4] = scales[:4] + 1 if tensors[name].dtype == torch.uint8 else scales[:4] * 1.5
        tensors[name] = scales.view(tensors[name].shape).to(tensors[name].dtype)

    quantised, plain = write("qwen3_5", tmp_path, FORMS[form], spoil=spoil)
    assert (logits(load(quantised)) - logits(load(plain))).abs().max() > 100 * CLOSE["atol"]


def assert_named_if_missing(form: str, missing: str, tmp_path: Path) -> None:
    """In one line."""

    def drop(tensors: Tensors) -> None:
        del tensors[missing]

    quantised, _ = write("qwen3_5", tmp_path, FORMS[form], spoil=drop)
    with pytest.raises(CheckpointError, match="is missing") as caught:
        load(quantised)
    assert missing in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_scale_is_named(form: str, tmp_path: Path) -> None:
    scale = FORMS[form].scale
    of_matrix = scale.startswith("_") and not scale.startswith("_weight")
    assert_named_if_missing(form, (Q_PROJ if of_matrix else Q_PROJ.removesuffix("weight")) + scale, tmp_path)


def test_a_scale_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    name = f"{Q_PROJ}_scale_inv"

    def cut(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:, :1]

    quantised, _ = write("qwen3_5", tmp_path, FORMS["fp8"], spoil=cut)
    with pytest.raises(CheckpointError) as caught:
        load(quantised)
    assert all(word in str(caught.value) for word in (name, "[6, 1]", "[6, 2]"))


def test_a_truncated_file_is_named_with_the_tensor_that_it_ends_in(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, FORMS["gptq"])
    weights = quantised / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        load(quantised)
    assert str(weights) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, ["hqq", "fp8", "compressed-tensors", "gptq", "awq"]),
        ({"quant_method": "auto-round", "bits": 2}, ["bits", "2", "4 and 8", "auto-round"]),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 3}}},
            ["extra_config.a.bits", "3", "4 and 8"],
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"},
            ["packing_format", "fp8_static", "auto_round:auto_awq"],
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, ["quant_algo", "NVFP4_AWQ", "W4A16_NVFP4"]),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, ["int4", "fp8_e4m3"]),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            ["bnb_4bit_quant_storage", "bfloat16", "uint8"],
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {
                    "default": {"_type": "Int4WeightOnlyConfig", "_data": {"int4_packing_format": "marlin_sparse"}}
                },
            },
            ["marlin_sparse", "plain"],
        ),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, ["bits", "3", "4 and 8"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["marlin", "gptq_v2"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["gemv", "gemm"]),
        ({"quant_method": "fp8"}, ["weight_block_size", "None", "[128, 128]"]),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, ["marlin-24", "pack-quantized"]),
    ],
)
def test_a_quantisation_that_is_not_read_is_named(config: dict[str, object], words: list[str], tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoint("qwen3_5"), tmp_path, quantization_config=config)
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def keys_of(settings: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in settings.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, name))


RARE: dict[str, dict[str, Any]] = {
    "gptq": {"dynamic": {"a": {"bits": 4, "group_size": 32}}},
    "auto-round": {"extra_config": {"a": {"bits": 4, "group_size": 32}}, "rotation_config": None},
    "modelopt": {"quantized_layers": {"a": {"quant_algo": "FP8"}}},
    "quark": {"layer_quant_config": {"a": {"weight": {"dtype": "fp4"}}}, "layer_type_quant_config": {}},
    "torchao": {"quant_type": {"default": {"_data": {"int4_packing_format": {"_data": "plain"}}}}},
}


@pytest.mark.parametrize("method", sorted({form.config["quant_method"] for form in FORMS.values()}))
def test_settings_of_another_kind_are_one_line_or_as_good_as_none(method: str) -> None:
    said: list[str] = []
    whole = {
        key: value
        for form in FORMS.values()
        if form.config["quant_method"] == method
        for key, value in form.config.items()
    } | RARE.get(method, {})
    for *above, key in keys_of(whole):
        for value in (7, "x", ["x"], {"a": 7}, None, 1.5):
            settings = inner = copy.deepcopy(whole)
            for name in above:
                inner = inner[name]
            inner[key] = value
            try:
                stored_form({"quantization_config": settings}, {}).rounds_inputs  # noqa: B018
            except CheckpointError as error:
                said.append(error.message)
    assert said, "the control"
    assert all("quantization_config" in line and "\n" not in line for line in said)


def test_names_of_settings_are_said_in_full(tmp_path: Path) -> None:
    for settings, said in (
        (
            _changed("packed_int4", 7, "config_groups", "group_0", "weights"),
            "quantization_config.config_groups.group_0.weights 7",
        ),
        (_changed("gptq", "many", "group_size"), "quantization_config.group_size 'many'"),
        (_changed("fp8_modelopt", [1], "quantized_layers"), "quantization_config.quantized_layers [1]"),
    ):
        with pytest.raises(CheckpointError) as caught:
            stored_form({"quantization_config": settings}, {})
        assert said in str(caught.value)


def _changed(form: str, value: object, *keys: str) -> dict[str, Any]:
    settings = inner = copy.deepcopy(FORMS[form].config)
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return settings


@pytest.mark.parametrize(
    ("form", "zeros"),
    [
        ("packed_int4_zeros", "weight_zero_point"),
        ("int8_groups", "weight_zero_point"),
        ("gptq", "qzeros"),
        ("gptq_zeros", "qzeros"),
        ("awq", "qzeros"),
        ("auto_round", "qzeros"),
        ("auto_round_awq", "qzeros"),
        ("int4_torchao", "_weight_zero_point"),
        ("int4_torchao_tiles", "_weight_scale_and_zero"),
    ],
)
def test_missing_zero_points_are_named(form: str, zeros: str, tmp_path: Path) -> None:
    assert_named_if_missing(form, Q_PROJ.removesuffix("weight") + zeros, tmp_path)


def test_zero_points_that_the_settings_deny_are_read_where_they_are(tmp_path: Path) -> None:
    form = replace(FORMS["awq"], config=FORMS["awq"].config | {"zero_point": False})
    quantised, plain = write("qwen3_5", tmp_path, form)
    torch.testing.assert_close(logits(load(quantised)), logits(load(plain)), **CLOSE)


def compressed(*inputs: object, kind: str = "float") -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            str(number): {"weights": {"type": kind, "num_bits": 8}, "input_activations": given}
            for number, given in enumerate(inputs)
        },
    }


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
QUARK = {"weight": {"dtype": "fp8_e4m3"}}
WEIGHTS_ALONE = [
    compressed(None),
    compressed({"num_bits": 8}, None),
    {**BLOCKS, "activation_scheme": None},
    {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    {"quant_method": "quark", "global_quant_config": QUARK},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
]
INPUTS_TOO = [
    compressed({"num_bits": 8}),
    compressed(None, kind="int"),
    BLOCKS,
    {**BLOCKS, "activation_scheme": "dynamic"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    {"quant_method": "quark", "global_quant_config": {**QUARK, "input_tensors": {"dtype": "fp8_e4m3"}}},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig"}}},
]


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [*((settings, False) for settings in WEIGHTS_ALONE), *((settings, True) for settings in INPUTS_TOO)],
)
def test_inputs_are_rounded_where_the_settings_do_not_say_weights_alone(
    settings: dict[str, object], rounds: bool
) -> None:
    assert stored_form({"quantization_config": settings}, {}).rounds_inputs is rounds


def test_what_a_quantised_checkpoint_leaves_plain_stays_plain(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, FORMS["awq"])
    layer = load(quantised).model.layers[0]
    parts = layer.mixer.project.weight.parts  # type: ignore[union-attr]
    assert [getattr(part, "bits", "plain") for part in parts] == [4, "plain"]  # q k v z, and b a


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.held != "float32"])
def test_a_matrix_that_is_kept_takes_the_bytes_of_its_tensors(name: str) -> None:
    """Within 3 %: a matrix of 512 columns, beside which sizes of models are larger."""
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    tensors, _ = FORMS[name].quantise("a.self_attn.x.weight" if name == "auto_round_mixed" else "a.x.weight", matrix)
    stored = sum(
        tensor.numel() * tensor.itemsize
        for end, tensor in tensors.items()
        if not end.endswith(("_shape", "g_idx", "weight_format"))
    )
    form = stored_form(
        {"quantization_config": FORMS[name].config},
        {
            end: StoredTensor(Path(), end, NAMES[tensor.dtype], tuple(tensor.shape), 0)
            for end, tensor in tensors.items()
        },
    )
    full = next(end for end in ("a.self_attn.x.weight", "a.x.weight") if form.holds(end))
    read = form.read(lambda end, shape, dtypes: tensors[end].reshape(shape), full, (256, 512))
    assert isinstance(read, Codes)
    assert in_tiles(read).nbytes <= 1.03 * stored


def test_codes_take_the_bytes_that_they_take_in_the_file(tmp_path: Path) -> None:
    quantised, plain = write("qwen3_5", tmp_path, FORMS["packed_int4"])
    stored = sum(
        tensor.numel() * tensor.itemsize
        for name, tensor in load_file(quantised / "model.safetensors").items()
        if not name.endswith("_shape")
    )
    held = load(quantised).weights_bytes
    assert stored <= held < 1.02 * stored
    assert held < 0.5 * load(plain).weights_bytes


def test_quantize_leaves_codes_as_they_are_and_rounds_what_is_plain(tmp_path: Path) -> None:
    quantised, _ = write("qwen3_5", tmp_path, FORMS["awq"])
    rounded = load(quantised, quantize="int8")
    parts = rounded.model.layers[0].mixer.project.weight.parts  # type: ignore[union-attr]
    assert [part.bits for part in parts] == [4, 8]
    assert torch.equal(
        load(quantised).model.layers[0].mixer.project.weight.parts[0].codes,  # type: ignore
        parts[0].codes,
    )


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granite"])
def test_rounded_weights_are_close_and_smaller(name: str) -> None:
    """Tiny random models feel rounding more than trained ones do."""
    plain = load(checkpoint(name))
    truth, errors = logits(plain), {}
    for quantize in ("int8", "int4"):
        rounded = load(checkpoint(name), quantize=quantize)
        errors[quantize] = float((logits(rounded) - truth).std() / truth.std())
        assert rounded.weights_bytes < 0.75 * plain.weights_bytes
        assert quantize in rounded.weights_form
    assert 0 < errors["int8"] < errors["int4"] / 3
    assert errors["int8"] < 0.05


def test_int4_keeps_the_steps_of_mamba_1_in_int8() -> None:
    """They steer every decay, and are few."""
    mixer = next(
        layer.mixer
        for layer in load(checkpoint("jamba"), quantize="int4").model.layers
        if hasattr(layer.mixer, "scans")
    )
    assert mixer.project.weight.bits == 4
    assert [part.weight.bits for scan in mixer.scans for part in (scan.select, scan.step)] == [8, 8]


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granite"])
def test_w8a8_has_the_weights_of_int8_and_rounds_inputs_too(name: str) -> None:
    int8, both = load(checkpoint(name), quantize="int8"), load_model(checkpoint(name), quantize="w8a8")
    assert both.weights_bytes == int8.weights_bytes
    assert "w8a8" in both.weights_form
    truth = logits(load(checkpoint(name)))
    four = load(checkpoint(name), quantize="int4")
    exact, rounded, rough = (float((logits(model) - truth).std()) for model in (int8, both, four))
    assert exact < rounded < rough / 4


def test_w8a8_takes_int8_of_files_with_it_and_leaves_int4_and_experts(tmp_path: Path) -> None:
    stored, _ = write("qwen3_5", tmp_path / "int8", FORMS["int8_rows"])
    assert load_model(stored, quantize="w8a8").weights_form.split(", ")[0] == "w8a8"
    assert "w8a8" not in load_model(stored).weights_form
    four, _ = write("qwen3_5", tmp_path / "int4", FORMS["packed_int4"])
    assert "int4" in load_model(four, quantize="w8a8").weights_form
    experts = load_model(checkpoint("qwen3_5_moe"), quantize="w8a8")
    assert {"int8", "w8a8"} <= set(experts.weights_form.split(", "))


def test_w8a8_without_products_of_bytes_is_the_same_model_and_says_that_it_is_slower() -> None:
    fast = load_model(checkpoint("lfm2"), quantize="w8a8")
    native.choose("torch")
    try:
        slow = load_model(checkpoint("lfm2"), quantize="w8a8")
        assert any("--quantize int8" in warning for warning in slow.warnings)
        torch.testing.assert_close(logits(slow), logits(fast), rtol=0, atol=0.05)
    finally:
        native.choose("auto")
    if native.in_use() and native.extension().has_byte_products():
        assert fast.warnings == ()


@pytest.mark.parametrize("name", ["qwen3_5_moe", "granite_moe"])
def test_experts_are_rounded_and_routers_are_not(name: str) -> None:
    """Of a model with experts the weights are compared: a router at a tie may choose another expert."""
    plain, rounded = load(checkpoint(name)), load(checkpoint(name), quantize="int8")
    for before, after in zip(plain.model.layers, rounded.model.layers, strict=True):
        block, other = before.feed_forward, after.feed_forward
        assert isinstance(block, ExpertsBlock)
        assert isinstance(other, ExpertsBlock)
        assert torch.equal(block.router.weight.tiles, other.router.weight.tiles)
        for part in ("gate_up", "down"):
            truth, made = getattr(block, part), getattr(other, part).dense()
            truth = truth if isinstance(truth, torch.Tensor) else truth.dense()
            assert 0 < (made - truth).abs().max() < truth.abs().max() / 127
    assert logits(rounded).isfinite().all()
    assert rounded.weights_bytes < 0.75 * plain.weights_bytes


def test_fp16_checkpoints_are_read(tmp_path: Path) -> None:
    def halved(tensors: Tensors) -> Tensors:
        return {name: tensor.half() for name, tensor in tensors.items()}

    directory = reformed("qwen3_5", tmp_path, halved)
    loaded = load_model(directory, "float32")
    assert loaded.weights_form == "float32"
    assert (logits(loaded) - logits(load(checkpoint("qwen3_5")))).abs().max() < 0.1
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert load_model(directory).weights_form.startswith("float16")


def test_a_prediction_head_of_other_shapes_is_left_out_with_a_warning(tmp_path: Path) -> None:
    extra = {"mtp.fc.weight": torch.arange(12.0).view(3, 4), "mtp.norm.weight": torch.ones(4)}
    directory = reformed("qwen3_5", tmp_path, lambda tensors: tensors | extra)
    plain, loaded = load(directory), load_model(directory, mtp=True)
    assert plain.weights_bytes == loaded.weights_bytes == load(checkpoint("qwen3_5")).weights_bytes
    assert plain.spec == loaded.spec
    assert loaded.model.mtp is None
    assert not any("multi-token" in line for line in plain.warnings)
    assert any("multi-token prediction is left out" in line and "tensor mtp." in line for line in loaded.warnings)


def test_what_was_read_is_counted(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load_model(checkpoint("lfm2"), on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (loaded.read_bytes, loaded.read_bytes)
    assert loaded.read_s > 0


def test_a_form_that_is_not_the_files_is_seen(tmp_path: Path) -> None:
    """Zeros of the second version read as the first's: the quirk matters."""
    quantised, plain = write("qwen3_5", tmp_path, FORMS["gptq_v2"])
    wrong = copy_checkpoint(quantised, tmp_path / "wrong", quantization_config=replace(FORMS["gptq_zeros"]).config)
    save_file(load_file(quantised / "model.safetensors"), wrong / "model.safetensors")
    assert (logits(load(wrong)) - logits(load(plain))).abs().max() > 100 * CLOSE["atol"]
