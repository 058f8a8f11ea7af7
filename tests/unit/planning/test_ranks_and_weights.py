"""One device's share of a model, and what weights take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.fixtures.checkpoints import CHECKPOINTS, checkpoint
from weft.errors import CheckpointError, ConfigError
from weft.families import named_dtype, read_architecture
from weft.families.mixers import BlockShape
from weft.families.sharding import possible_tps, rank_architecture
from weft.planning.geometries import GEOMETRIES, find_geometry
from weft.planning.model_plan import ModelPlan, PlanOptions, make_plan
from weft.planning.weights import FORMS, TWELVE_BIT, count_weights, form_of
from weft.spec import DTypeName


def plan_of(name: str, **asked: object) -> ModelPlan:
    geometry = find_geometry(name)
    assert geometry is not None
    return make_plan(geometry.name, geometry.config, PlanOptions(arena_bytes=1 << 30, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.short_name)
def test_parameters_are_as_many_as_the_makers_say(geometry) -> None:
    plan = make_plan(geometry.name, geometry.config, PlanOptions(arena_bytes=1 << 30))
    assert plan.weights.parameters / 1e9 == pytest.approx(geometry.published, rel=0.03)
    assert plan.weights.rank_bytes == sum(plan.weights.parts.values())
    assert plan.weights.rank_bytes == pytest.approx(2 * plan.weights.parameters, rel=0.005)  # bf16


@pytest.mark.parametrize(
    ("name", "kv_heads", "state_mb"),
    [
        ("Qwen3.5-0.8B", 6 * 2 * 256, 19.5),
        ("Qwen3.5-4B", 8 * 4 * 256, 51.5),
        ("Qwen3.5-9B", 8 * 4 * 256, 51.5),
        ("Qwen3.5-27B", 16 * 4 * 256, 153.9),
        ("Qwen3.5-35B-A3B", 10 * 2 * 256, 64.4),
        ("Qwen3.5-122B-A10B", 12 * 2 * 256, 153.6),
        ("granite-4.0-h-350m", 4 * 4 * 64, 22.3),
        ("granite-4.0-h-1b", 4 * 4 * 128, 57.3),
        ("granite-4.0-h-micro", 4 * 8 * 64, 76.4),
        ("granite-4.0-h-tiny", 4 * 4 * 128, 57.3),
        ("LFM2-350M", 6 * 8 * 64, 0.041),
        ("LFM2-700M", 6 * 8 * 64, 0.061),
        ("NVIDIA-Nemotron-Nano-9B-v2", 4 * 8 * 128, 143.5),
        ("Falcon-H1-7B", 44 * 2 * 128, 139.4),
    ],
)
def test_a_row_has_the_kv_heads_and_states_of_its_model(name: str, kv_heads: int, state_mb: float) -> None:
    """``kv_heads``: numbers of keys per token, layers x heads x dims."""
    plan = plan_of(name)
    assert plan.kv_token_bytes == 2 * 2 * kv_heads
    assert plan.state_bytes / 1e6 == pytest.approx(state_mb, abs=0.0005 if state_mb < 1 else 0.05)


def kinds_of(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield from (below, *kinds_of(below))


def test_every_mixer_and_feed_forward_can_be_weighed() -> None:
    architectures = [
        read_architecture(json.loads((checkpoint(name) / "config.json").read_text())) for name in CHECKPOINTS
    ]
    records = [record for one in architectures for record in (*one.mixers, *one.feed_forwards) if record]
    kinds = {kind.__name__ for kind in kinds_of(BlockShape) if kind.__module__.startswith("weft.")}
    assert {type(record).__name__ for record in records} == kinds - {"Mixer"}
    assert all(
        tensor.elements(1) > 0
        for record in records
        for table in record.tables(64)
        for stored in table.values()
        for tensor in stored
    )


def test_a_device_leaves_a_tenth_beside_the_weights_to_the_tensors_of_a_step() -> None:
    geometry = find_geometry("Qwen3.5-4B")
    assert geometry is not None
    plan = make_plan(geometry.name, geometry.config, PlanOptions(memory_bytes=24 << 30))
    left = (24 << 30) - plan.weights.rank_bytes
    assert plan.workspace_bytes == pytest.approx(left / 10, rel=1e-6)
    assert left - plan.workspace_bytes - plan.arena.frame_bytes < plan.arena.arena_bytes <= left - plan.workspace_bytes


def test_kv_heads_are_divided_and_then_replicated() -> None:
    kv = [plan_of("Qwen3.5-397B-A17B", tp=tp).kv_token_bytes for tp in (1, 2, 4, 8, 16)]
    assert kv == [30720, 15360, 15360, 15360, 15360]
    states = [plan_of("Qwen3.5-397B-A17B", tp=tp).state_bytes for tp in (1, 2, 4, 8, 16)]
    assert states == [states[0] // tp for tp in (1, 2, 4, 8, 16)]


def test_groups_of_mamba2_are_replicated_and_those_of_experts_left_alone() -> None:
    tp8 = plan_of("Nemotron-H-8B", tp=8)
    tp16 = plan_of("Nemotron-H-8B", tp=16)
    assert tp8.state_bytes * 8 == plan_of("Nemotron-H-8B").state_bytes
    assert tp16.state_bytes * 2 > tp8.state_bytes  # B and C no longer shrink


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.short_name)
def test_devices_together_hold_the_model_and_little_twice(geometry) -> None:
    whole = make_plan(geometry.name, geometry.config, PlanOptions(arena_bytes=1 << 30)).weights.rank_bytes
    options = PlanOptions(arena_bytes=1 << 30, tp=2)
    part = make_plan(geometry.name, geometry.config, options).weights.rank_bytes
    assert whole <= 2 * part < 1.03 * whole


def test_a_tp_that_does_not_divide_names_what_and_which_do() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of("Qwen3.5-4B", tp=3)
    assert caught.value.message == (
        "--tp is 3, which does not divide this model: 16 key heads of gated delta, 32 value heads of gated "
        "delta, 16 heads of attention, 4 KV heads of attention; it may be 1, 2, 4, 8, 16"
    )
    assert caught.value.param == "--tp"


def test_a_rank_of_one_is_the_model_itself() -> None:
    geometry = find_geometry("Falcon-H1-7B")
    assert geometry is not None
    whole = read_architecture(geometry.config)
    assert rank_architecture(whole, 1) is whole
    assert possible_tps(whole) == [1, 2, 4, 6, 12]
    assert (
        rank_architecture(whole, 2).spec().state_bytes_per_sequence("bfloat16")
        > whole.spec().state_bytes_per_sequence("bfloat16") // 2
    )  # one group, on both


def test_quantised_weights_take_what_their_form_says() -> None:
    bf16, fp8, int4 = (plan_of("Qwen3.5-9B", quantize=form).weights for form in (None, "fp8", "int4"))
    tables = bf16.parts["embedding"] + bf16.parts["head"]
    assert fp8.parts["embedding"] == bf16.parts["embedding"]
    for form, bits in ((fp8, 8), (int4, 4 + 20 / 128)):
        assert (form.rank_bytes - tables) / (bf16.rank_bytes - tables) == pytest.approx(bits / 16, abs=0.002)
    assert FORMS["int4"].matrix_bytes(128) == 64 + 3  # 16-bit scale, 4-bit zero, rounded up


@pytest.mark.parametrize(
    ("quantization", "name", "bits"),
    [
        (None, "bfloat16", 16),
        ({}, "bfloat16", 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq 4-bit", 4),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq 4-bit", 4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None}}},
            },
            "compressed-tensors 8-bit",
            8,
        ),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, "auto-round 4-bit", 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4, widened to bfloat16", 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 8),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "mxfp4 as int8 codes", 8),
        ({"quant_method": "mxfp4"}, "mxfp4 as int8 codes", 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4 or fp4, widened to bfloat16", 16),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit", 8),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "torchao 8-bit", 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            "nvfp4, widened to bfloat16",
            16,
        ),
    ],
)
def test_the_form_of_weights_is_read_from_config_json(quantization: object, name: str, bits: int) -> None:
    form = form_of({"quantization_config": quantization}, "bfloat16", None)
    assert (form.name, form.bits) == (name, bits)
    assert form_of({"quantization_config": quantization}, "bfloat16", "int4") is FORMS["int4"]
    assert form_of({"text_config": {"quantization_config": quantization}}, "bfloat16", None) == form


def test_floats_of_4_bits_are_counted_as_a_cpu_and_as_gpus_keep_them() -> None:
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    assert form_of(config, "bfloat16", None, twelve_bit=True).matrix_bytes(64) == 32 + 4
    assert form_of(config, "bfloat16", None).bits == 16


def test_fp8_is_counted_as_gpus_keep_it_and_as_a_cpu_widens_it() -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert form_of(config, "bfloat16", None).matrix_bytes(256 * 128) == 256 * 128 + 4 * 256 // 16
    widened = form_of(config, "bfloat16", None, twelve_bit=True)
    assert widened == replace(TWELVE_BIT, name="fp8, widened to bfloat16 in 12 bits")
    both = form_of(config | {"expert_dtype": "fp4"}, "bfloat16", None)
    model = read_architecture({"model_type": "deepseek_v4", "dtype": "bfloat16"})
    parts, plain = (count_weights(model, model, 1, form).parts for form in (both, form_of(config, "bfloat16", None)))
    assert plain.pop("experts") == pytest.approx(parts.pop("experts"), rel=0.06), "codes of fp4 take a byte on GPUs"
    assert parts == plain
    kept = form_of(config | {"expert_dtype": "fp4"}, "bfloat16", None, twelve_bit=True)
    assert (kept.name, kept.experts and kept.experts.bits) == (
        "fp8, widened to bfloat16 in 12 bits, experts mxfp4 as int4 codes", 4)  # fmt: skip


def test_floats_in_codes_are_counted_as_a_cpu_with_wide_vectors_keeps_them() -> None:
    def bits(quantization: dict[str, object], dtype: DTypeName = "bfloat16") -> float:
        form = form_of({"quantization_config": quantization}, dtype, None, twelve_bit=True, coded_tiles=True)
        return form.matrix_bytes(1 << 20) / (1 << 17)

    assert bits({"quant_method": "fp8", "weight_block_size": [128, 128]}) == 8 + 32 / 128 / 16
    assert bits({"quant_method": "modelopt", "quant_algo": "MXFP8"}) == 8.25
    assert bits({"quant_method": "bitsandbytes", "load_in_4bit": True}) == 4.5
    assert bits({"quant_method": "bitsandbytes", "load_in_4bit": True}, "float32") == 32
    assert bits({"quant_method": "fp8", "weight_block_size": [128, 128]}, "float32") == 32
    assert bits({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "float16") == 16


@pytest.mark.parametrize(
    "quantization",
    [{"quant_method": "magic"}, {"quant_method": "awq", "bits": 3}, {"quant_method": "compressed-tensors"}],
)
def test_an_unknown_form_names_its_method_and_the_flag(quantization: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="--quantize"):
        form_of({"quantization_config": quantization}, "bfloat16", None)


def test_a_tied_head_is_not_counted_twice() -> None:
    geometry = find_geometry("Qwen3.5-4B")
    assert geometry is not None
    tied = read_architecture(geometry.config)
    untied = read_architecture({**geometry.config, "tie_word_embeddings": False})
    form = form_of({}, "bfloat16", None)
    assert (
        count_weights(untied, untied, 1, form).parameters - count_weights(tied, tied, 1, form).parameters
        == 248320 * 2560
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3", "int8"])
def test_a_dtype_of_the_cache_is_not_taken_for_one_of_weights(dtype: str) -> None:
    with pytest.raises(CheckpointError, match="float32, bfloat16, float16"):
        named_dtype({"torch_dtype": dtype})
