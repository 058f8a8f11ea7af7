"""Public models by name: the keys of their ``config.json`` that decide sizes, so that a plan needs no network.

A row is a configuration and goes through ``families`` like any other: a key that is not in a row has the family's
default, and a mistake here is a wrong ``config.json``, not a second formula. Each row is the file of that name on the
hub (https://huggingface.co/NAME/blob/main/config.json), reduced to geometry; a test compares each row with the
parameter count that the makers publish.

A name is looked up without its owner, without regard to case, and may be cut short if only one row begins with it
("qwen3.5-397b"). Suffixes such as "-Instruct" are fine-tunes of the same geometry.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of a public model. ``published``: the parameter count that the makers name, in billions."""

    name: str
    published: float
    config: Mapping[str, Any]

    @property
    def short_name(self) -> str:
        return self.name.split("/")[-1]


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, v_heads: int, **more: Any) -> dict[str, Any]:
    """Return a config of Qwen3.5 and Qwen3-Next: every fourth layer is attention, the others are gated delta nets."""
    moe = "num_experts" in more
    return {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    } | more


def _moe(count: int, per_token: int, width: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


def _granite(
    layers: int, hidden: int, heads: int, kv_heads: int, mamba_heads: int, shared: int, **more: Any
) -> dict[str, Any]:
    """Return a config of Granite 4.0 H. The choice of the four attention layers changes no size."""
    attention_at = more.pop("attention_at", (5, 15, 25, 35))
    return {
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "layer_types": ["attention" if i in attention_at else "mamba" for i in range(layers)],
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "shared_intermediate_size": shared,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    } | more


def _lfm2(hidden: int, heads: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "lfm2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 16,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "block_ff_dim": width,
        "block_multiple_of": 256,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
    }


def _nemotron(
    pattern: str, hidden: int, width: int, heads: int, mamba_head_dim: int, max_positions: int
) -> dict[str, Any]:
    """Return a config of Nemotron-H, with a letter per layer: M Mamba-2, * attention, - feed-forward."""
    return {
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": mamba_head_dim,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "vocab_size": 131072,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
    }


def _jamba(hidden: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "jamba",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": hidden // 16,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "vocab_size": 65536,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    }


def _falcon_h1(
    layers: int, hidden: int, width: int, heads: int, mamba_heads: int, mamba_head_dim: int, vocab: int
) -> dict[str, Any]:
    return {
        "model_type": "falcon_h1",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": mamba_heads * mamba_head_dim,
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": mamba_head_dim,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_rms_norm": False,
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    }


_NEMOTRON_52 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NEMOTRON_56 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"

GEOMETRIES: tuple[Geometry, ...] = (
    Geometry("Qwen/Qwen3.5-0.8B", 0.75, _qwen(24, 1024, 8, 2, 16, intermediate_size=3584,
                                             tie_word_embeddings=True)),
    Geometry("Qwen/Qwen3.5-4B", 4.2, _qwen(32, 2560, 16, 4, 32, intermediate_size=9216,
                                          tie_word_embeddings=True)),
    Geometry("Qwen/Qwen3.5-9B", 9.0, _qwen(32, 4096, 16, 4, 32, intermediate_size=12288)),
    Geometry("Qwen/Qwen3.5-27B", 27, _qwen(64, 5120, 24, 4, 48, intermediate_size=17408)),
    Geometry("Qwen/Qwen3.5-35B-A3B", 35, _qwen(40, 2048, 16, 2, 32, **_moe(256, 8, 512))),
    Geometry("Qwen/Qwen3.5-122B-A10B", 122, _qwen(48, 3072, 32, 2, 64, **_moe(256, 8, 1024))),
    Geometry("Qwen/Qwen3.5-397B-A17B", 397, _qwen(60, 4096, 32, 2, 64, **_moe(512, 10, 1024))),
    Geometry("Qwen/Qwen3-Next-80B-A3B", 80, _qwen(48, 2048, 16, 2, 32, model_type="qwen3_next",
                                                 vocab_size=151936, **_moe(512, 10, 512))),
    Geometry("ibm-granite/granite-4.0-h-350m", 0.34, _granite(
        32, 768, 12, 4, 48, 2048, mamba_d_head=32, attention_at=(10, 13, 17, 27),
        max_position_embeddings=32768)),
    Geometry("ibm-granite/granite-4.0-h-1b", 1.5, _granite(40, 1536, 12, 4, 48, 4096)),
    Geometry("ibm-granite/granite-4.0-h-micro", 3.2, _granite(40, 2048, 32, 8, 64, 8192)),
    Geometry("ibm-granite/granite-4.0-h-tiny", 7, _granite(
        40, 1536, 12, 4, 48, 1024, intermediate_size=512, num_local_experts=64, num_experts_per_tok=6)),
    Geometry("ibm-granite/granite-4.0-h-small", 32, _granite(
        40, 4096, 32, 8, 128, 1536, intermediate_size=768, num_local_experts=72, num_experts_per_tok=10)),
    Geometry("LiquidAI/LFM2-350M", 0.354, _lfm2(1024, 16, 6656)),
    Geometry("LiquidAI/LFM2-700M", 0.742, _lfm2(1536, 24, 10240)),
    Geometry("LiquidAI/LFM2-1.2B", 1.17, _lfm2(2048, 32, 12288)),
    Geometry("nvidia/Nemotron-H-8B-Base-8K", 8.1, _nemotron(_NEMOTRON_52, 4096, 21504, 32, 64, 8192)),
    Geometry("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8.9, _nemotron(_NEMOTRON_56, 4480, 15680, 40, 80, 131072)),
    Geometry("ai-sage/GigaChat3.5-432B-A28B", 432, {
        "model_type": "gigachat3_5", "torch_dtype": "bfloat16", "max_position_embeddings": 262144,
        "full_attention_layers": list(range(3, 40, 4)), "num_nextn_predict_layers": 2}),
    Geometry("ai21labs/AI21-Jamba-1.5-Mini", 52, _jamba(4096, 14336, 32, 32)),
    Geometry("tiiuae/Falcon-H1-7B-Base", 7.6, _falcon_h1(44, 3072, 12288, 12, 24, 128, 130048)),
)  # fmt: skip


def find_geometry(name: str) -> Geometry | None:
    """Return the row that ``name`` means, None if there is none, or several that it may mean."""
    key = _key(name)
    exact = [geometry for geometry in GEOMETRIES if _key(geometry.name) == key]
    begun = [geometry for geometry in GEOMETRIES if _key(geometry.name).startswith(key + "-")]
    matches = exact or (begun if "/" not in name else [])
    return matches[0] if len(matches) == 1 else None


def near_names(name: str) -> list[str]:
    """Return up to three names of the table that ``name`` may have meant, nearest first."""
    keys = {_key(geometry.name): geometry.short_name for geometry in GEOMETRIES}
    near = difflib.get_close_matches(_key(name), keys, n=3, cutoff=0.5)
    return [keys[key] for key in near]


_SUFFIXES = re.compile(r"(-(instruct|thinking|base|chat|8k))+$")


def _key(name: str) -> str:
    """Return the key of a name: "Qwen/Qwen3-Next-80B-A3B-Instruct" -> "qwen3-next-80b-a3b"."""
    return _SUFFIXES.sub("", name.split("/")[-1].lower())
