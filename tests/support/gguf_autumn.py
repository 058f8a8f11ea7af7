"""The converter's changes for Apertus, Llama 4, Laguna, Mellum, PLaMo and Nemotron-H Puzzle, as ``gguf_files`` has
those of other models: ``renamed`` for tensors, ``keys_of`` for numbers.

Tensors get names that gguf's table has, or the table of a model with the same parts has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import gguf
import torch

AUTUMN = ("apertus", "llama4_text", "laguna", "mellum", "plamo2", "plamo3", "nemotron_h_puzzle")
ARCHITECTURES = {name: name for name in AUTUMN} | {"llama4_text": "llama4", "nemotron_h_puzzle": "nemotron_h"}
TABLES = {"laguna": "afmoe", "mellum": "qwen3moe"}
"""Architectures whose names gguf's table does not have yet, and those with the same."""
_LAGUNA = {
    "self_attn.g_proj": "self_attn.gate_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate.weight": "mlp.router.gate.weight",
    "experts.e_score_correction_bias": "expert_bias",
    "shared_expert.": "shared_experts.",
}
_PLAMO = {
    "pre_mixer_norm": 1.0, "post_mixer_norm": 1 / 5, "pre_mlp_norm": 1.0, "post_mlp_norm": 1 / 5**1.5,
    "mixer.q_norm": 1.0, "mixer.k_norm": 1.0, "model.norm": 1.0,
}  # fmt: skip
_PLAMO_ENDS = {"norm_weight": "norm.weight", "q_weight": "q.weight", "k_weight": "k.weight"}


def renamed(
    tensors: Mapping[str, torch.Tensor], kind: str, forget: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model of ``kind`` as the table knows them. Numbers of Apertus's activation are keys."""
    for name, x in tensors.items():
        if kind == "laguna":
            for ours, theirs in _LAGUNA.items():
                name = name.replace(ours, theirs)
        if kind.startswith("plamo"):
            added = next((added for part, added in _PLAMO.items() if name.endswith(f"{part}.weight")), 0.0)
            x = x if "plus_one" in forget else x + added
            for ours, theirs in _PLAMO_ENDS.items():
                name = name.removesuffix(ours) + theirs if name.endswith(ours) else name
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), x.transpose(1, 2).chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        elif kind == "llama4_text" and name.endswith("experts.down_proj"):
            yield f"{name}.weight", x.transpose(1, 2)
        elif kind == "nemotron_h_puzzle" and ".experts." in name:
            place, _, part = name.replace("model.", "backbone.").partition(".experts.")
            yield from ((f"{place}.experts.{number}.{part}.weight", one) for number, one in enumerate(x))
        elif kind == "nemotron_h_puzzle":
            yield name.replace("model.", "backbone."), x
        elif "act_fn" not in name:
            yield name, x


def keys_of(config: Mapping[str, Any], writer: gguf.GGUFWriter, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the further keys by name; floats of one number, or of each layer."""
    read, rope, kind = config.get, config.get("rope_parameters") or {}, config["model_type"]
    if kind == "apertus":
        for number in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [x.item() for name, x in tensors.items() if name.endswith(f"act_fn.{number}")]
            writer.add_array(f"xielu.{number}", values)
        return {}
    if kind == "llama4_text":
        whole = {} if config["attention_chunk_size"] else {"attention.sliding_window": 0}
        step = {"interleave_moe_layer_step": config["interleave_moe_layer_step"]}
        widths = ("feed_forward_length", "intermediate_size_mlp"), ("expert_feed_forward_length", "intermediate_size")
        return whole | step | {theirs: config[ours] for theirs, ours in widths}
    if kind in ("laguna", "mellum"):
        return _windowed(config, rope)
    if kind == "nemotron_h_puzzle":
        blocks = config["block_configs"]
        return {
            f"expert_{theirs}": [block.get(ours) or 0 for block in blocks]
            for theirs, ours in (
                ("feed_forward_length", "moe_intermediate_size"),
                ("used_count", "num_experts_per_tok"),
            )
        }
    if kind == "plamo2":
        step, count = config["mamba_step"], config["num_hidden_layers"]
        heads = [layer % step == step // 2 for layer in range(count)]
        return {
            "rope.freq_base": config["rope_theta"],
            "attention.key_length": config["hidden_size_per_head"],
            "attention.head_count": [has * config["num_attention_heads"] for has in heads],
            "attention.head_count_kv": [has * config["num_key_value_heads"] for has in heads],
            "ssm.inner_size": config["mamba_num_heads"] * config["hidden_size_per_head"],
            "ssm.time_step_rank": config["mamba_num_heads"],
            "ssm.group_count": 0,
        }
    scaled: dict[str, Any] = {"rope.freq_base": config["rope_theta"], "rope.freq_base_swa": config["rope_local_theta"]}
    if read("rope_scaling_factor"):
        scaled |= {"rope.scaling.type": "yarn", "rope.scaling.factor": config["rope_scaling_factor"],
                   "rope.scaling.original_context_length": config["initial_context_length"]}  # fmt: skip
    windows = (
        ("attention.sliding_window", "window_size"),
        ("attention.sliding_window_pattern", "sliding_window_pattern"),
    )
    return scaled | {theirs: config[ours] for theirs, ours in windows}


def _windowed(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Laguna and Mellum, whose layers with a window have positions of their own."""
    full, near, dim = rope["full_attention"], rope["sliding_attention"], config["head_dim"]
    keys: dict[str, Any] = {
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": near["rope_theta"],
        "rope.dimension_count": int(dim * full.get("partial_rotary_factor", 1.0)),
        "rope.dimension_count_swa": int(dim * near.get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": config["sliding_window"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }
    if full["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": full["factor"],
            "rope.scaling.yarn_attn_factor": full["attention_factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
    if config["model_type"] == "mellum":
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        return keys | {"attention.sliding_window_pattern": windows}
    return keys | {
        "attention.head_count": config["num_attention_heads_per_layer"],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config["moe_routed_scaling_factor"]),
    }
