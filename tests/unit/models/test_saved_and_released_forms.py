"""Hub releases, what transformers saves, and what it holds in memory spell tensors differently: one model.

``checkpoint(name)`` is what transformers saves; a family's other spellings are made of it here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import CHECKPOINTS, VOCAB_SIZE, checkpoint, copy_checkpoint, reference
from tests.oracle.model_driver import ModelDriver
from weft.errors import CheckpointError
from weft.models.loading import LoadedModel, load_model

Tensors = dict[str, torch.Tensor]
TOKENS = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(7)).tolist()


def logits(loaded: LoadedModel) -> torch.Tensor:
    driver = ModelDriver(loaded.model, sequences=1, length=80)
    [prefill] = driver.step((0, TOKENS))
    return torch.cat([prefill, *driver.step((0, [5]))])


def reformed(source: str, directory: Path, tensors: Tensors) -> Path:
    copy_checkpoint(checkpoint(source), directory)
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


@pytest.mark.parametrize(
    ("name", "saved", "held"),
    [
        ("kimi_linear", "block_sparse_moe.experts.7.w3.weight", "mlp.experts.gate_up_proj"),
        ("kimi_linear", "self_attn.A_log", "self_attn.forget_gate.A_log"),
        ("ling", "attention.k_conv1d.weight", "self_attn.conv1d.weight"),
        ("ling", "attention.dense.weight", "self_attn.o_proj.weight"),
        ("olmo_hybrid", "linear_attn.k_conv1d.weight", "linear_attn.conv1d.weight"),
        ("lfm2_moe", "feed_forward.experts.7.w1.weight", "feed_forward.experts.gate_up_proj"),
        ("lfm3", "self_attn.gate_proj.weight", "self_attn.g_proj.weight"),
        ("qwen3_moe", "mlp.experts.7.up_proj.weight", "mlp.experts.gate_up_proj"),
        ("lara_mini", "linear_attn.in_proj.weight", "linear_attn.in_proj_qkv.weight"),
        ("deepseek_v4", "attn.indexer.compressor.wgate.weight", "self_attn.compressor.indexer.gate_proj.weight"),
        ("laguna", "mlp.experts.5.up_proj.weight", "mlp.experts.gate_up_proj"),
    ],
)
def test_what_is_saved_and_what_is_held_in_memory_are_the_same_model(
    name: str, saved: str, held: str, tmp_path: Path
) -> None:
    memory = reference(name).state_dict()
    assert any(held in key for key in memory)
    assert any(saved in key for key in load_file(checkpoint(name) / "model.safetensors"))
    loaded = load_model(reformed(name, tmp_path / "held", memory))
    assert loaded.warnings == ()
    assert torch.equal(logits(loaded), logits(load_model(checkpoint(name))))


def kimi_as_released(tensors: Tensors) -> Tensors:
    """Dense layers under ``mlp``, as on the hub."""
    return {
        re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): tensor
        for name, tensor in tensors.items()
    }


def k3_as_released(tensors: Tensors) -> Tensors:
    """In a wrapper; queries of residuals in the spelling that mlx-lm reads too."""
    named = ((re.sub(r"_res_(proj|norm)[.]weight", r"_res.\1_weight", name), tensors[name]) for name in tensors)
    return {f"language_model.{name}": tensor for name, tensor in named}


def olmo_as_released(tensors: Tensors) -> Tensors:
    """Convolutions as wide as q, k and v; norms of attention layers under their usual names."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if "q_conv1d" in name:
            whole = torch.cat([tensors[name.replace("q_conv1d", f"{part}_conv1d")] for part in "qkv"])
            for part, piece in zip("qkv", whole.split([64, 64, 128]), strict=True):
                out[name.replace("q_conv1d", f"{part}_conv1d")] = piece
        elif "conv1d" not in name:
            attention = name.startswith(("model.layers.1.", "model.layers.3."))
            out[name.replace("feedforward_layer_norm", "post_attention_layernorm") if attention else name] = tensor
    return out


def inkling_as_released(tensors: Tensors) -> Tensors:
    """Rows of gate and up take turns in one tensor; shared experts too."""

    def turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack((gate, up), dim=-2).flatten(-3, -2)

    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("gate_proj.weight"):
            name, tensor = (
                name.replace("gate_proj", "w13_dn"),
                turns(tensor, tensors[name.replace("gate_proj", "up_proj")]),
            )
        elif name.endswith("shared_experts.gate_proj"):
            name, tensor = (
                name.replace("gate_proj", "shared_w13_weight"),
                turns(tensor, tensors[name.replace("gate_proj", "up_proj")]),
            )
        elif "experts.gate_up_proj" in name:
            name, tensor = name.replace("gate_up_proj", "w13_weight"), turns(*tensor.chunk(2, dim=1))
        elif ".up_proj" in name:
            continue
        for here, released in (
            ("lm_head", "model.llm.unembed"),
            ("model.embed_tokens.embed_norm", "model.llm.embed_norm"),
            ("model.embed_tokens", "model.llm.embed"),
            ("model.layers", "model.llm.layers"),
            ("model.norm", "model.llm.norm"),
            ("shared_experts.down_proj", "shared_experts.shared_w2_weight"),
            ("experts.down_proj", "experts.w2_weight"),
            ("mlp.down_proj", "mlp.w2_md"),
            ("gate.e_score_correction_bias", "gate.bias"),
            ("q_proj", "wq_du"),
            ("k_proj", "wk_dv"),
            ("v_proj", "wv_dv"),
            ("r_proj", "wr_du"),
            ("o_proj", "wo_ud"),
            ("sconv.conv1d", "sconv"),
            ("self_attn", "attn"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "mlp_norm"),
        ):
            name = name.replace(here, released)
        out[name] = tensor
    return out


def deepseek_v4_as_released(tensors: Tensors) -> Tensors:
    """No prefix, and a head for further tokens, which is not read."""
    out: Tensors = {"mtp.0.hnorm.weight": torch.ones(64)}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        out[name.replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    return out


def rwkv_as_first_released(tensors: Tensors) -> Tensors:
    """The six mixes of a layer as one tensor."""
    out = {name: tensor for name, tensor in tensors.items() if ".attn.x_" not in name}
    for layer in range(3):
        inside = f"model.layers.{layer}.attn"
        out[f"{inside}.x_x"] = torch.cat([tensors[f"{inside}.x_{part}"][0] for part in "rwkvag"])
    return out


@pytest.mark.parametrize(
    ("name", "change", "spelling"),
    [
        ("deepseek_v4", deepseek_v4_as_released, "layers.2.attn.kv_norm.weight"),
        ("rwkv7", rwkv_as_first_released, "model.layers.2.attn.x_x"),
        ("inkling", inkling_as_released, "model.llm.layers.1.attn.wq_du.weight"),
        ("kimi_linear", kimi_as_released, "model.layers.0.mlp.up_proj.weight"),
        ("kimi_k3", k3_as_released, "language_model.model.layers.1.mlp_res.proj_weight"),
        ("olmo_hybrid", olmo_as_released, "model.layers.1.post_attention_layernorm.weight"),
    ],
)
def test_what_is_saved_and_what_is_released_are_the_same_model(
    name: str, change: Callable[[Tensors], Tensors], spelling: str, tmp_path: Path
) -> None:
    before = load_file(checkpoint(name) / "model.safetensors")
    after = change(before)
    assert spelling in after
    assert spelling not in before
    loaded = load_model(reformed(name, tmp_path / "hub", after))
    assert loaded.warnings == ()
    assert torch.equal(logits(loaded), logits(load_model(checkpoint(name))))


def test_a_multimodal_checkpoint_as_transformers_writes_it_has_the_same_text(tmp_path: Path) -> None:
    """The wrapper as transformers writes it: text_config and vision_config, a tower beside the text model."""
    text = CHECKPOINTS["qwen3_5_moe"][1]
    config = transformers.Qwen3_5MoeConfig(
        text_config=text | {"eos_token_id": 2, "bos_token_id": None, "pad_token_id": None},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Qwen3_5MoeForConditionalGeneration(config).eval().float()
        for tensor in model.parameters():
            if tensor.dim() > 1:
                torch.nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.warnings == ()
    assert loaded.model.vision is not None
    with torch.inference_mode():
        wanted = model(torch.tensor([[*TOKENS, 5]])).logits[0]
    assert (logits(loaded) - wanted).abs().max().item() < 1e-4
    assert wanted.argmax(-1).unique().numel() > 20


def test_inkling_in_its_wrapper_has_the_same_text_beside_towers_that_are_skipped(tmp_path: Path) -> None:
    tensors = inkling_as_released(load_file(checkpoint("inkling") / "model.safetensors"))
    towers = {"model.visual.layers.linear_0.weight": torch.zeros(2, 2), "model.audio.encoder.weight": torch.zeros(2, 2)}
    directory = reformed("inkling", tmp_path / "hub", tensors | towers)
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({"model_type": "inkling_mm_model", "text_config": text | {"unpadded_vocab_size": 480}})
    )
    loaded = load_model(directory)
    assert loaded.warnings == (
        "Skipped the vision tower (1 tensor, 16 B) and the audio tower (1 tensor, "
        "16 B): weft serves the text part of this model.",
    )
    got, whole = logits(loaded), logits(load_model(checkpoint("inkling")))
    assert torch.equal(got[:, :480], whole[:, :480])
    assert (got[:, 480:] == float("-inf")).all()  # the head is padded to the vocabulary


def test_a_cap_on_logits_leaves_tokens_beyond_a_padded_head_impossible(tmp_path: Path) -> None:
    shorter = copy_checkpoint(checkpoint("inkling2"), tmp_path / "shorter", unpadded_vocab_size=480)
    got, whole = logits(load_model(shorter)), logits(load_model(checkpoint("inkling2")))
    assert torch.equal(got[:, :480], whole[:, :480])
    assert whole.abs().max() < 7.0  # the cap
    assert (got[:, 480:] == float("-inf")).all()


RELEASED_EXAONE = {
    "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
    "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
RELEASED_SARVAM = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
    "self_attn": "attention", "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}  # fmt: skip


def renamed(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize(("name", "names"), [("exaone", RELEASED_EXAONE), ("sarvam_moe", RELEASED_SARVAM)])
def test_names_of_a_release_and_its_joined_rows_are_read(name: str, names: dict[str, str], tmp_path: Path) -> None:
    """Sarvam's files have queries, keys and values as one tensor."""
    tensors = load_file(checkpoint(name) / "model.safetensors")
    if name == "sarvam_moe":
        for end in ("weight", "bias"):
            for query in [key for key in tensors if key.endswith(f"self_attn.q_proj.{end}")]:
                rows = [tensors.pop(query.replace("q_proj", f"{part}_proj")) for part in "qkv"]
                tensors[query.replace("q_proj", "query_key_value")] = torch.cat(rows)
    released = reformed(name, tmp_path, {renamed(key, names): tensor for key, tensor in tensors.items()})
    assert torch.equal(logits(load_model(released)), logits(load_model(checkpoint(name))))


def test_rows_in_eight_parts_as_in_codegen_2_are_the_same_model(tmp_path: Path) -> None:
    tensors = load_file(checkpoint("codegen") / "model.safetensors")
    for name in [key for key in tensors if key.endswith("qkv_proj.weight")]:
        q, v, k = (kind.flatten(0, 1) for kind in tensors[name].view(4, 3, 32, 128).unbind(1))  # of 4 parts
        tensors[name] = torch.stack([kind.view(8, 16, 128) for kind in (q, v, k)], 1).view(-1, 128)
        tensors[name.replace("qkv_proj.weight", "causal_mask")] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    released = reformed("codegen", tmp_path, tensors)
    assert not torch.allclose(logits(load_model(released)), logits(load_model(checkpoint("codegen"))), atol=1e-2)
    stated = copy_checkpoint(released, tmp_path / "stated", head_dim=16)
    assert torch.equal(logits(load_model(stated)), logits(load_model(checkpoint("codegen"))))


def test_rows_that_the_experts_cannot_share_are_refused(tmp_path: Path) -> None:
    tensors = load_file(checkpoint("dbrx") / "model.safetensors")
    name = "transformer.blocks.1.ffn.experts.mlp.v1"
    short = tensors | {name: tensors[name][:-1]}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\.up_proj\.weight .* is missing"):
        load_model(reformed("dbrx", tmp_path / "short", short))
