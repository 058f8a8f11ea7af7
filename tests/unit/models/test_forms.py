"""The forms a checkpoint comes in (wrappers, experts one by one or stacked, old names) are one model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import VOCAB_SIZE, checkpoint, copy_checkpoint
from tests.oracle.model_driver import ModelDriver
from weft.models.loading import load_model

Tensors = dict[str, torch.Tensor]


def logits(directory: Path) -> torch.Tensor:
    tokens = torch.randint(0, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(7)).tolist()
    loaded = load_model(directory)
    assert not any("not used" in line for line in loaded.warnings)
    [prefill] = (driver := ModelDriver(loaded.model, sequences=1, length=80)).step((0, tokens))
    return torch.cat([prefill, *driver.step((0, [5]))])


def reformed(source: str, directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Checkpoint ``source`` with its tensors put in another form."""
    copy_checkpoint(checkpoint(source), directory)
    tensors = change(load_file(directory / "model.safetensors"))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors")
    return directory


def experts_one_by_one(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name):
            for expert, weight in enumerate(tensor):
                parts = (
                    dict(zip(("gate", "up"), weight.chunk(2), strict=True))
                    if match[2] == "gate_up"
                    else {"down": weight}
                )
                out |= {f"{match[1]}.{expert}.{part}_proj.weight": value for part, value in parts.items()}
        else:
            out[name] = tensor
    return out


def experts_stacked(tensors: Tensors) -> Tensors:
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    blocks = {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}
    for block in blocks:

        def all_of(part: str, block: str = block) -> torch.Tensor:
            return torch.stack([tensors[f"{block}.{e}.{part}_proj.weight"] for e in range(8)])

        if f"{block}.gate_up_proj" in tensors:
            out |= {name: tensor for name, tensor in tensors.items() if name.startswith(block)}
        else:
            out[f"{block}.gate_up_proj"] = torch.cat([all_of("gate"), all_of("up")], dim=1)
            out[f"{block}.down_proj"] = all_of("down")
    return out


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_experts_stored_one_by_one_and_stacked_are_the_same_model(name: str, tmp_path: Path) -> None:
    single = reformed(name, tmp_path / "single", experts_one_by_one)
    stacked = reformed(name, tmp_path / "stacked", experts_stacked)
    assert any("experts.7.gate_proj.weight" in key for key in load_file(single / "model.safetensors"))
    assert any("experts.gate_up_proj" in key for key in load_file(stacked / "model.safetensors"))
    assert torch.equal(logits(single), logits(stacked))
    assert torch.equal(logits(single), logits(checkpoint(name)))


_OLD_GRANITE = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


@pytest.mark.parametrize("old", [True, False])
def test_granite_experts_under_old_and_new_names_are_the_same_model(old: bool, tmp_path: Path) -> None:
    names = _OLD_GRANITE if old else {new: name for name, new in _OLD_GRANITE.items()}

    def rename(tensors: Tensors) -> Tensors:
        def new_name(name: str) -> str:
            for before, after in names.items():
                name = name.replace(before, after)
            return name

        return {new_name(name): tensor for name, tensor in tensors.items()}

    directory = reformed("granite_moe", tmp_path / "renamed", rename)
    keys = load_file(directory / "model.safetensors")
    assert any(name in key for key in keys for name in names.values())
    assert torch.equal(logits(directory), logits(checkpoint("granite_moe")))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", ""])
def test_a_language_model_inside_a_wrapper_is_found(prefix: str, tmp_path: Path) -> None:
    """As hub releases of Qwen3.5: text_config, tensors under another prefix, beside a vision tower."""

    def wrap(tensors: Tensors) -> Tensors:
        renamed = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in tensors.items()}
        return renamed | {"model.visual.blocks.0.norm1.weight": torch.zeros(3), "mtp.norm.weight": torch.zeros(3)}

    directory = reformed("qwen3_5", tmp_path / "wrapped", wrap)
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "model_type": "qwen3_5",
                "text_config": text,
                "vision_config": {"depth": 1},
                "tie_word_embeddings": False,
            }
        )
    )
    assert torch.equal(logits(directory), logits(checkpoint("qwen3_5")))


def test_a_base_model_under_other_wrapper_keys_keeps_its_own_head(tmp_path: Path) -> None:
    def move_head(tensors: Tensors) -> Tensors:
        return tensors | {"language_model.lm_head.weight": tensors.pop("lm_head.weight")}

    moved = reformed("qwen3_5", tmp_path / "moved", move_head)
    assert torch.equal(logits(moved), logits(checkpoint("qwen3_5")))


def test_the_comparison_notices_one_changed_weight(tmp_path: Path) -> None:
    def nudge(tensors: Tensors) -> Tensors:
        tensors["model.layers.2.linear_attn.in_proj_qkv.weight"][3, 3] += 0.5
        return tensors

    nudged = reformed("qwen3_5", tmp_path / "nudged", nudge)
    assert not torch.allclose(logits(nudged), logits(checkpoint("qwen3_5")), atol=1e-4)
