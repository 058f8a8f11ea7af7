"""Adapters against peft: the same logits for every projection of every family, and for each thing that an
adapter can hold. peft runs over transformers in float64; the rows beside are of the base model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.adapters import PREFIX, factors, linear_names, peft_adapter, written
from tests.fixtures.checkpoints import VOCAB_SIZE, checkpoint, exact_reference
from tests.oracle.model_driver import ModelDriver
from weft.adapters import read_adapter
from weft.errors import CheckpointError
from weft.models.adapters import install, load_adapter, remove
from weft.models.decoder import CausalModel
from weft.models.loading import load_model
from weft.tensor.adapter_rows import StepAdapters
from weft.tensor.inputs import StepInputs

TOLERANCE = 1e-4
FAMILIES = (
    "qwen3_tied",
    "qwen3_5",
    "qwen3_next",
    "lfm2",
    "granite_moe",
    "bamba",
    "falcon_h1",
    "nemotron_h_latent",
    "jamba",
    "zamba",
    "zamba2",
    "gpt2",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "olmo_hybrid",
    "lfm3",
    "kimi_linear",
    "ling",
    "gpt_oss",
    "gemma4",
    "recurrent_gemma",
    "minimax",
    "zaya",
    "xlstm",
    "ling_2_5",
    "minicpm_sala",
    "rwkv7",
    "jet_nemotron",
)
TOKENS = torch.randint(3, VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(1)).tolist()


class _Driver(ModelDriver):
    """``digests``: by sequence, whose its rows are."""

    digests: tuple[str, ...] = ()

    def _inputs(self, pieces: tuple[tuple[int, list[int]], ...], pads: int) -> StepInputs:
        inputs = super()._inputs(pieces, pads)
        whose = [self.digests[index] for index, _ in pieces]
        return replace(inputs, adapters=StepAdapters.of(whose, inputs.runs.lengths))


def model_with(name: str, *directories: Path) -> tuple[CausalModel, list[str]]:
    """A model, and the digests of its adapters."""
    model, digests = load_model(checkpoint(name)).model, []
    for directory in directories:
        adapter = read_adapter("a", directory)
        install(model, load_adapter(adapter, model))
        digests.append(adapter.digest)
    return model, digests


def logits(model: CausalModel, *digests: str) -> list[torch.Tensor]:
    """Of TOKENS by each adapter, in one step: half as a prompt, then token by token."""
    driver = _Driver(model, sequences=len(digests), length=64)
    driver.digests = digests
    outputs = [[piece] for piece in driver.step(*((i, TOKENS[:20]) for i in range(len(digests))))]
    for token in TOKENS[20:]:
        pieces = driver.step(*((i, [token]) for i in range(len(digests))))
        for rows, piece in zip(outputs, pieces, strict=True):
            rows.append(piece)
    return [torch.cat(rows) for rows in outputs]


@torch.inference_mode()
def of(model: Any) -> torch.Tensor:
    return model(torch.tensor([TOKENS])).logits[0].float()


def check(name: str, directory: Path, truth: torch.Tensor) -> None:
    """The adapter's rows are ``truth``, and not those of the base, whose own rows have not moved."""
    plain = of(exact_reference(name))
    model, [digest] = model_with(name, directory)
    adapted, base = logits(model, digest, "")
    assert (adapted - truth).abs().max().item() < TOLERANCE
    assert (base - plain).abs().max().item() < TOLERANCE
    assert (truth - plain).abs().max().item() > 0.01, "an adapter that changes nothing shows nothing"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_projection_of_a_family_has_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    # transformers' Mamba-1 reads dt_proj's weight past peft's wrapper: there the adapter is without effect.
    names = linear_names(exact_reference(name), but=("dt_proj",))
    head = ("lm_head",) if not exact_reference(name).config.tie_word_embeddings else ()
    more = {"fan_in_fan_out": True} if name == "gpt2" else {}
    adapted = peft_adapter(exact_reference(name), tmp_path, target_modules=[*names, *head], **more)
    check(name, tmp_path, of(adapted))


@pytest.mark.parametrize("name", ["kimi_linear", "ling", "qwen3_5"])
def test_dora_of_every_projection_has_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    """Of latent attention's ``kv_b_proj`` too, whose halves go to queries and to outputs."""
    check(name, tmp_path, of(peft_adapter(exact_reference(name), tmp_path, use_dora=True)))


@torch.no_grad()
def test_dora_of_single_experts_has_the_logits_of_peft(tmp_path: Path) -> None:
    """peft has no DoRA of stacks: its own merged matrix of each expert stands in the reference."""
    import peft  # here: a second of each worker, and few tests need it

    name, tensors = "qwen3_moe", {}
    merged = copy.deepcopy(exact_reference(name))
    experts = merged.model.layers[0].mlp.experts
    for number, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        parts = dict(zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True))
        for leaf, weight in ({**parts, "down_proj": down}).items():
            linear = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
            linear.weight.copy_(weight)
            single = torch.nn.ModuleDict({leaf: linear})
            settings = {"r": 4, "lora_alpha": 2, "target_modules": [leaf], "init_lora_weights": False}
            wrapped = peft.get_peft_model(single, peft.LoraConfig(**settings, use_dora=True))
            for parameter_name, parameter in wrapped.named_parameters():
                if "magnitude" in parameter_name:
                    parameter.add_(torch.rand_like(parameter))
            home = f"model.layers.0.mlp.experts.{number}."
            tensors |= {
                home + key.removeprefix(PREFIX): tensor.float()
                for key, tensor in peft.get_peft_model_state_dict(wrapped).items()
            }
            weight.copy_(wrapped.merge_and_unload()[leaf].weight)
    check(name, written(tmp_path, tensors, use_dora=True), of(merged))


def test_the_step_projection_of_mamba_has_the_logits_of_merged_weights(tmp_path: Path) -> None:
    adapted = peft_adapter(exact_reference("mamba"), tmp_path, target_modules=["dt_proj", "x_proj"])
    check("mamba", tmp_path, of(adapted.merge_and_unload()))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.*": 7}},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_each_setting_of_peft_has_its_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    name = "qwen3_tied" if "bias" in str(settings) or "use_dora" in settings else "qwen3"
    adapted = peft_adapter(exact_reference(name), tmp_path, **settings)
    if "modules_to_save" in settings:
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if "modules_to_save" in parameter_name:
                    parameter.mul_(1.5)
        adapted.save_pretrained(tmp_path)
    check(name, tmp_path, of(adapted))


@pytest.mark.parametrize(
    "targets", [["experts.gate_up_proj", "experts.down_proj"], ["experts.down_proj"]], ids=["both", "down"]
)
def test_stacks_of_experts_have_the_logits_of_peft(targets: list[str], tmp_path: Path) -> None:
    adapted = peft_adapter(
        exact_reference("qwen3_moe"),
        tmp_path,
        target_modules=["q_proj"],
        target_parameters=[f"mlp.{one}" for one in targets],
    )
    check("qwen3_moe", tmp_path, of(adapted))


def test_single_experts_are_the_slices_of_a_stack(tmp_path: Path) -> None:
    name = "qwen3_moe"
    config = exact_reference(name).config
    count, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    each = [factors("", hidden, width, seed=number) for number in range(count)]
    a, b = (torch.stack([one[f".lora_{side}.weight"] for one in each]) for side in "AB")
    stack = {
        "model.layers.0.mlp.experts.lora_A.weight": a.flatten(0, 1),
        "model.layers.0.mlp.experts.lora_B.weight": b.permute(1, 2, 0).flatten(1),
    }
    single = {
        f"model.layers.0.mlp.experts.{number}.down_proj{end}": tensor
        for number, one in enumerate(each)
        for end, tensor in one.items()
    }
    model, digests = model_with(
        name, written(tmp_path / "a", stack, target_parameters=["experts.down_proj"]), written(tmp_path / "b", single)
    )
    stacked, apart, base = logits(model, *digests, "")
    assert torch.equal(stacked, apart)
    assert not torch.equal(stacked, base)


SPELLINGS = {
    "gate and up": ("qwen3", "model.layers.0.mlp.", [("gate_proj", 96), ("up_proj", 96)], "gate_up_proj", 64),
    "q, k and v": (
        "qwen3",
        "model.layers.0.self_attn.",
        [("q_proj", 128), ("k_proj", 64), ("v_proj", 64)],
        "qkv_proj",
        64,
    ),
    "halves of a fused one": (
        "granite",
        "model.layers.0.shared_mlp.",
        [("gate_proj", 96), ("up_proj", 96)],
        "input_linear",
        64,
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fused_and_split_spellings_of_one_matrix_are_one_adapter(spelling: str, tmp_path: Path) -> None:
    name, home, parts, whole, columns = SPELLINGS[spelling]
    one = factors(home + whole, sum(rows for _, rows in parts), columns)
    [a, b] = one.values()
    split, first = {}, 0
    for part, rows in parts:
        split |= {f"{home}{part}.lora_A.weight": a, f"{home}{part}.lora_B.weight": b[first : first + rows]}
        first += rows
    model, digests = model_with(name, written(tmp_path / "a", one), written(tmp_path / "b", split))
    fused, apart, base = logits(model, *digests, "")
    assert (fused - apart).abs().max().item() < TOLERANCE
    assert (fused - base).abs().max().item() > 0.01


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_both_spellings_of_a_delta_projection_load_whatever_is_stored(name: str, tmp_path: Path) -> None:
    """vllm 47639: half of a fused matrix (``in_proj_qkv`` without ``z``) crashed; llama.cpp 21125: rows in
    another order gave other answers."""
    heads, ratio, width = 2, 2, 16
    grouped = factors("model.layers.0.linear_attn.in_proj_qkvz", heads * width * (2 + 2 * ratio), 64)
    a, b = grouped.values()
    q, k, v, z = b.view(heads, -1, 4).split([width, width, ratio * width, ratio * width], dim=1)
    rows = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    home = "model.layers.0.linear_attn.in_proj_"
    split = {
        f"{home}qkv.lora_A.weight": a,
        f"{home}qkv.lora_B.weight": rows,
        f"{home}z.lora_A.weight": a,
        f"{home}z.lora_B.weight": z.flatten(0, 1),
    }
    half = {key: tensor for key, tensor in split.items() if "qkv" in key}
    model, digests = model_with(
        name, written(tmp_path / "a", grouped), written(tmp_path / "b", split), written(tmp_path / "c", half)
    )
    fused, apart, part, base = logits(model, *digests, "")
    assert (fused - apart).abs().max().item() < TOLERANCE
    assert (part - base).abs().max().item() > 0.001
    assert (part - fused).abs().max().item() > 0.001


def test_an_adapter_of_the_gates_of_a_delta_net_is_not_dropped(tmp_path: Path) -> None:
    """sglang 30499 left ``in_proj_a`` and ``in_proj_b`` out and said nothing; vllm 49354: without effect."""
    adapted = peft_adapter(
        exact_reference("qwen3_5"), tmp_path, target_modules=["in_proj_a", "in_proj_b"], lora_alpha=32
    )
    check("qwen3_5", tmp_path, of(adapted))


def test_a_module_that_matches_nothing_is_an_error_with_the_nearest_names(tmp_path: Path) -> None:
    """peft 3554: most layers were left out, and nobody was told."""
    model = load_model(checkpoint("qwen3")).model
    adapter = read_adapter("a", written(tmp_path, factors("model.layers.1.self_attn.query_proj", 128, 64)))
    with pytest.raises(CheckpointError, match=r"query_proj.*nearest.*layers\.1\.self_attn\.q") as caught:
        load_adapter(adapter, model)
    assert "\n" not in caught.value.message


def test_a_removed_adapter_leaves_nothing(tmp_path: Path) -> None:
    model = load_model(checkpoint("kimi_linear")).model
    [before] = logits(model, "")
    peft_adapter(exact_reference("kimi_linear"), tmp_path)
    adapter = read_adapter("a", tmp_path)
    loaded = load_adapter(adapter, model)
    install(model, loaded)
    [changed] = logits(model, adapter.digest)
    remove(model, loaded)
    [after] = logits(model, adapter.digest)
    assert torch.equal(before, after)
    assert not torch.equal(before, changed)
