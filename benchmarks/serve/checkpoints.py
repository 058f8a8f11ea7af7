"""Checkpoints to measure with: real geometries, seeded random weights, and a tokenizer that knows every id.

    geometry (family, size)  ->  transformers config  ->  random weights in a dtype  ->  a directory

``350m`` follows LFM2-350M, Granite-4.0-H-350M and Qwen3.5-0.8B (16 of its 24 layers, a smaller vocabulary);
``small`` keeps the shape at about a tenth of the weights, ``tiny`` is for tests. Speed does not depend on
what the weights are, only on their shapes, so no download is needed. A finished directory is reused: it is
renamed into place last.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["lfm2", "granite", "qwen"]
Size = Literal["350m", "small", "tiny"]
DTypeName = Literal["bfloat16", "float32"]

FAMILIES: tuple[Family, ...] = ("lfm2", "granite", "qwen")
SIZES: tuple[Size, ...] = ("350m", "small", "tiny")
RECIPE = 2
"""Counts the changes of what is written here, so that a directory made before them is not taken for it."""
MAX_POSITIONS = 8192
INITIALIZER_RANGE = 0.1
"""Five times the usual: layers then outweigh the tied embedding, and greedy answers vary."""

_LFM2: dict[Size, dict[str, Any]] = {
    "350m": {"hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16, "vocab_size": 65536,
             "num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "small": {"hidden_size": 512, "intermediate_size": 2304, "num_hidden_layers": 8, "vocab_size": 16384,
              "num_attention_heads": 8, "num_key_value_heads": 4, "full_attn_idxs": [2, 5, 7]},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 512,
             "num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1]},
}  # fmt: skip
_GRANITE: dict[Size, dict[str, Any]] = {
    "350m": {"hidden_size": 768, "shared_intermediate_size": 2048, "num_hidden_layers": 32,
             "vocab_size": 100352, "num_attention_heads": 12, "num_key_value_heads": 4,
             "attention_at": [10, 13, 17, 27], "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128},
    "small": {"hidden_size": 384, "shared_intermediate_size": 1024, "num_hidden_layers": 10,
              "vocab_size": 16384, "num_attention_heads": 6, "num_key_value_heads": 2, "attention_at": [4],
              "mamba_n_heads": 24, "mamba_d_head": 32, "mamba_d_state": 128},
    "tiny": {"hidden_size": 64, "shared_intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512,
             "num_attention_heads": 4, "num_key_value_heads": 2, "attention_at": [1],
             "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
}  # fmt: skip
_QWEN: dict[Size, dict[str, Any]] = {
    "350m": {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 16, "vocab_size": 65536,
             "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
             "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "small": {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 8, "vocab_size": 16384,
              "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 8,
              "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 2,
             "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
             "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``directory``: of the checkpoint, or a GGUF file."""

    family: str
    size: str
    dtype: DTypeName
    directory: Path
    vocab_size: int
    parameters: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.size}-{self.dtype}"


def make_checkpoint(family: Family, size: Size, dtype: DTypeName, *, under: Path, seed: int = 0) -> Checkpoint:
    """The checkpoint directory, made when it is not there yet (needs transformers)."""
    directory = under / f"{family}-{size}-{dtype}-seed{seed}-recipe{RECIPE}"
    if not directory.exists():
        building = directory.with_name(directory.name + ".building")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        _build(family, size, dtype, seed, building)
        os.rename(building, directory)
    facts = json.loads((directory / "benchmark.json").read_text())
    return Checkpoint(family, size, dtype, directory, facts["vocab_size"], facts["parameters"])


def _build(family: Family, size: Size, dtype: DTypeName, seed: int, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = config_of(family, size)
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    _name_layers_as_published(directory / "config.json")
    save_tokenizer(directory, config.vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    facts = {"vocab_size": config.vocab_size, "parameters": parameters}
    (directory / "benchmark.json").write_text(json.dumps(facts))


def config_of(family: Family, size: Size) -> Any:
    """Transformers' config object of a geometry."""
    import transformers

    shared: dict[str, Any] = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
    }
    if family == "lfm2":
        # Transformers has no use for these two; published configs have them, and other engines read them.
        widths = dict.fromkeys(("conv_dim", "block_dim"), _LFM2[size]["hidden_size"])
        return transformers.Lfm2Config(**_LFM2[size], **shared, **widths)
    if family == "qwen":
        return transformers.AutoConfig.for_model("qwen3_5_text", **_QWEN[size], **shared)
    geometry = dict(_GRANITE[size])
    attention_at = geometry.pop("attention_at")
    kinds = ["attention" if i in attention_at else "mamba" for i in range(geometry["num_hidden_layers"])]
    head_dim = geometry["hidden_size"] // geometry["num_attention_heads"]
    return transformers.GraniteMoeHybridConfig(
        **geometry,
        **shared,
        layer_types=kinds,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        intermediate_size=geometry["shared_intermediate_size"],
        num_local_experts=0,
        num_experts_per_tok=0,
        embedding_multiplier=1.0,
        attention_multiplier=1 / head_dim,
        residual_multiplier=0.246,
        logits_scaling=3.0,
    )


def _name_layers_as_published(path: Path) -> None:
    """Newer transformers write ``linear_attention`` for Granite's Mamba-2 layers, where published configs and
    the engines that read them say ``mamba``."""
    config = json.loads(path.read_text())
    if config["model_type"] == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [names.get(kind, kind) for kind in config["layer_types"]]
        path.write_text(json.dumps(config, indent=2))


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Ids 0-2 special, then one per byte, then made-up words: every id decodes to some text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{index}" for index in range(vocab_size - len(special) - len(alphabet))]
    tokens = [*special, *alphabet, *words]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
