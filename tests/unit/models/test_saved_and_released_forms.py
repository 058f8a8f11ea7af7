"""Hub releases, what transformers saves, and what it holds in memory spell tensors differently: one model.

``checkpoint(name)`` is what transformers saves; a family's other spellings are made of it here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import CHECKPOINTS, VOCAB_SIZE, checkpoint, copy_checkpoint, reference
from tests.oracle.model_driver import ModelDriver
from weft.models.loading import LoadedModel, load_model

Tensors = dict[str, torch.Tensor]
TOKENS = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(7)).tolist()


def logits(loaded: LoadedModel) -> torch.Tensor:
    driver = ModelDriver(loaded.model, sequences=1, length=80)
    [prefill] = driver.step((0, TOKENS))
    return torch.cat([prefill, *driver.step((0, [5]))])


def reformed(source: str, directory: Path, tensors: Tensors) -> Path:
    copy_checkpoint(checkpoint(source), directory)
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()},
              directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(("name", "saved", "held"), [
    ("kimi_linear", "block_sparse_moe.experts.7.w3.weight", "mlp.experts.gate_up_proj"),
    ("kimi_linear", "self_attn.A_log", "self_attn.forget_gate.A_log"),
    ("ling", "attention.k_conv1d.weight", "self_attn.conv1d.weight"),
    ("ling", "attention.dense.weight", "self_attn.o_proj.weight"),
    ("olmo_hybrid", "linear_attn.k_conv1d.weight", "linear_attn.conv1d.weight"),
    ("lfm2_moe", "feed_forward.experts.7.w1.weight", "feed_forward.experts.gate_up_proj"),
    ("lfm3", "self_attn.gate_proj.weight", "self_attn.g_proj.weight"),
    ("qwen3_moe", "mlp.experts.7.up_proj.weight", "mlp.experts.gate_up_proj"),
])
def test_what_is_saved_and_what_is_held_in_memory_are_the_same_model(name: str, saved: str, held: str,
                                                                     tmp_path: Path) -> None:
    memory = reference(name).state_dict()
    assert any(held in key for key in memory)
    assert any(saved in key for key in load_file(checkpoint(name) / "model.safetensors"))
    loaded = load_model(reformed(name, tmp_path / "held", memory))
    assert loaded.warnings == ()
    assert torch.equal(logits(loaded), logits(load_model(checkpoint(name))))


def kimi_as_released(tensors: Tensors) -> Tensors:
    """Dense layers under ``mlp``, as on the hub."""
    return {re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): tensor
            for name, tensor in tensors.items()}


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
            out[name.replace("feedforward_layer_norm", "post_attention_layernorm")
                if attention else name] = tensor
    return out


def rwkv_as_first_released(tensors: Tensors) -> Tensors:
    """The six mixes of a layer as one tensor."""
    out = {name: tensor for name, tensor in tensors.items() if ".attn.x_" not in name}
    for layer in range(3):
        inside = f"model.layers.{layer}.attn"
        out[f"{inside}.x_x"] = torch.cat([tensors[f"{inside}.x_{part}"][0] for part in "rwkvag"])
    return out


@pytest.mark.parametrize(("name", "change", "spelling"), [
    ("rwkv7", rwkv_as_first_released, "model.layers.2.attn.x_x"),
    ("kimi_linear", kimi_as_released, "model.layers.0.mlp.up_proj.weight"),
    ("olmo_hybrid", olmo_as_released, "model.layers.1.post_attention_layernorm.weight"),
])
def test_what_is_saved_and_what_is_released_are_the_same_model(
        name: str, change: Callable[[Tensors], Tensors], spelling: str, tmp_path: Path) -> None:
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
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
                       "patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16})
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
