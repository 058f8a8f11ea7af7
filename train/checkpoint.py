"""Writes a trained model as a `transformers` checkpoint directory, and reads one back.

Weights are stored as bfloat16 to halve the package; `config.json` says float32, so a loader computes in
the precision that was measured. Rounding the weights once costs no answers (docs/models.md).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from train.model import Model, Shape
from train.tokenizer import END_OF_TEXT, TURN_END, save_tokenizer

ROTARY_SECTION = [3, 3, 2]
MTP = "mtp."


def _checkpoint_name(name: str) -> str:
    return f"model.{name}"


def _config(shape: Shape, tokens_max: int, tokenizer: Tokenizer) -> dict[str, object]:
    sizes = shape.as_dict()
    rotary = {
        "rope_type": "default",
        "rope_theta": sizes.pop("rope_theta"),
        "partial_rotary_factor": sizes["partial_rotary_factor"],
        "mrope_section": ROTARY_SECTION,
        "mrope_interleaved": True,
    }
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        **sizes,
        "layer_types": list(shape.layer_types),
        "num_hidden_layers": len(shape.layer_types),
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": tokens_max,
        "rope_parameters": rotary,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def export(model: Model, tokenizer: Tokenizer, directory: Path, tokens_max: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach().to(torch.bfloat16)
        if name.endswith("conv1d.weight"):
            value = value.unsqueeze(1)
        tensors[_checkpoint_name(name)] = value.contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # it is written readable by its owner only
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False}
    (directory / "config.json").write_text(json.dumps(_config(model.shape, tokens_max, tokenizer), indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, directory, tokens_max)


def save_mtp(head: nn.Module, directory: Path) -> None:
    """Adds the head to a checkpoint, under the names of the public checkpoints."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if not name.startswith(MTP)}
    for name, value in head.state_dict().items():
        tensors[MTP + name] = value.detach().to(torch.bfloat16).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    config = json.loads((directory / "config.json").read_text())
    config |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_mtp(head: nn.Module, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    values = {n.removeprefix(MTP): value.float() for n, value in tensors.items() if n.startswith(MTP)}
    head.load_state_dict(values)


def read_shape(directory: Path) -> Shape:
    config = json.loads((directory / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    sizes = {name: config[name] for name in Shape.__dataclass_fields__}
    sizes["layer_types"] = tuple(sizes["layer_types"])
    return Shape(**sizes)


def load(directory: Path) -> tuple[Model, Tokenizer]:
    model = Model(read_shape(directory))
    tensors = load_file(directory / "model.safetensors")
    values = {name.removeprefix("model."): value.float() for name, value in tensors.items() if not name.startswith(MTP)}
    values = {name: value.squeeze(1) if name.endswith("conv1d.weight") else value for name, value in values.items()}
    model.load_state_dict(values)
    return model.eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))
