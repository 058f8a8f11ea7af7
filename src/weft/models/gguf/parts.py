"""Common parts of the layouts of GGUF files: numbers of attention and experts, names, and ``Undo``.

    attn_q.weight [rows, columns]  --Undo(rows, columns, log, minus)-->  self_attn.q_proj.weight

Each architecture (``architectures``, ``latent``, ``gemma``) joins these dictionaries, and adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.models.gguf.header import FileTensor
from weft.models.gguf.keys import GgufKeys, shortest

Index = npt.NDArray[np.int64]
Names = dict[str, str | tuple[str, ...]]


SOFTMAX, SIGMOID, CHOSEN_SOFTMAX = 1, 2, 3
"""``expert_gating_func`` (llama.cpp's ``llama_expert_gating_func_type``)."""


@dataclass(frozen=True, slots=True)
class Undo:
    """Change of a stored tensor to undo. ``rows`` and ``columns``: indices of ours in the stored tensor; None for all,
    in order. ``log``: log(|x|). ``minus``: number that the converter added to each value.
    """

    rows: Index | None = None
    columns: Index | None = None
    log: bool = False
    minus: float = 0.0

    @property
    def is_nothing(self) -> bool:
        return self.rows is None and self.columns is None and not self.changes_values

    @property
    def changes_values(self) -> bool:
        return self.log or self.minus != 0.0


NOTHING = Undo()
LOG = Undo(log=True)
MINUS_ONE = Undo(minus=1.0)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of a file. ``config``: of config.json. ``whole``: names outside of layers. ``undo``: by our names.
    ``stack``: the part before the number of a layer in our names. ``numbers``: names of one number of each layer, by
    the key of the array that has the numbers of all layers."""

    config: dict[str, Any]
    whole: Names
    names: Names
    undo: dict[str, Undo] = field(default_factory=dict)
    stack: str = "model.layers"
    numbers: Mapping[str, str] = field(default_factory=dict)


ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose content is in config.json."""


def base(keys: GgufKeys, model_type: str, **more: Any) -> dict[str, Any]:
    """Return the settings that every configuration has."""
    table = keys.tensor("token_embd.weight")
    if table is None or len(table.shape) != 2:
        keys.fail("vocab_size", None, "the file has no token_embd.weight of two dims")
    return {
        "model_type": model_type,
        "vocab_size": table.shape[0],
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.layers,
        "max_position_embeddings": keys.integer("context_length", least=1),
        "tie_word_embeddings": keys.tensor("output.weight") is None,
        **({} if keys.boolean("attention.causal", True) else {"is_causal": False}),
        "dtype": {"F32": "float32", "F16": "float16"}.get(table.type, "bfloat16"),
    } | more


def attention(keys: GgufKeys, scaled: str = "linear") -> dict[str, Any]:
    """Return the settings of attention. ``scaled``: meaning of a factor without a type; llama.cpp takes it as
    linear.
    """
    heads = keys.integer("attention.head_count", least=1)
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // heads, least=1)
    if (value_dim := keys.integer("attention.value_length", head_dim)) != head_dim:
        keys.fail("attention.value_length", value_dim, f"keys have {head_dim} numbers, and values must have as many")
    rotary = keys.integer("rope.dimension_count", head_dim)
    part = {"partial_rotary_factor": rotary / head_dim} if rotary != head_dim else {}
    return {
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "rope_parameters": positions(keys, rotary, scaled) | part,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads, least=1),
        "attention_bias": any(keys.tensor(first(keys, f"attn_{part}.bias")) is not None for part in ("q", "qkv")),
    }


def positions(keys: GgufKeys, rotary: int, scaled: str = "linear") -> dict[str, Any]:
    """Return the rotary settings of heads of which ``rotary`` numbers turn. ``scaled``: as for ``attention``."""
    parameters: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0), "rope_type": "default"}
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    kind = keys.get("rope.scaling.type", "none" if factor in (0.0, 1.0) else scaled)
    if kind in ("linear", "yarn"):
        parameters |= {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": keys.integer(
                "rope.scaling.original_context_length", keys.integer("context_length")
            ),
        }
        for ours, theirs in (
            ("attention_factor", "attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("beta_fast", "beta_fast"),  # Ollama's names
            ("beta_slow", "beta_slow"),
        ):
            if keys.get(f"rope.scaling.{theirs}") is not None:
                parameters[ours] = keys.number(f"rope.scaling.{theirs}")
    elif kind != "none":
        keys.fail("rope.scaling.type", kind, "none, linear and yarn are served")
    if keys.tensor("rope_factors_long.weight") is not None:
        parameters |= _longrope(keys, rotary)
    if (divisors := keys.tensor("rope_freqs.weight")) is not None:
        parameters |= _llama3(keys, divisors, parameters["rope_theta"], rotary)
    return parameters


def yarn_factor(keys: GgufKeys) -> dict[str, Any]:
    """Return the factor on queries and keys that a file states for YaRN."""
    factor = keys.number("rope.scaling.yarn_attn_factor", 0.0)
    return {"attention_factor": factor} if factor else {}


def near_positions(keys: GgufKeys, head_dim: int) -> dict[str, Any]:
    """Return the rotary settings of layers with a window, where the file has a base of their own, never scaled."""
    share = keys.integer("rope.dimension_count_swa", head_dim) / head_dim
    theta = keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10_000.0))
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}


def _numbers_of(keys: GgufKeys, tensor: FileTensor, rotary: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the numbers of a tensor that has one for each pair of ``rotary`` dims that turn."""
    if tensor.type != "F32" or tensor.shape != (rotary // 2,):
        keys.fail("rope.dimension_count", rotary, f"{tensor.name} is {tensor.type} of {tensor.shape}")
    return np.fromfile(tensor.file, "<f4", rotary // 2, offset=tensor.begin)


def _longrope(keys: GgufKeys, rotary: int) -> dict[str, Any]:
    """Return the scaling of Phi 3: a divisor of each frequency, for long texts and for short ones."""
    stated: dict[str, Any] = {"rope_type": "longrope"}
    for kind in ("long", "short"):
        if (tensor := keys.tensor(f"rope_factors_{kind}.weight")) is None:
            keys.fail("rope.scaling.type", "longrope", f"the file has no rope_factors_{kind}")
        stated[f"{kind}_factor"] = [shortest(float(number)) for number in _numbers_of(keys, tensor, rotary)]
    return stated | {
        "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }


_LLAMA3 = [
    {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": 8192} for high in (4.0, 1.0)
]
"""Scaling settings of releases with that kind of scaled positions: Llama 3.1 and Apertus, and Llama 4. A file has only
their results."""


def _llama3(keys: GgufKeys, tensor: FileTensor, theta: float, rotary: int) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 or 4, which divides frequencies by the numbers of ``rope_freqs``."""
    divisors = _numbers_of(keys, tensor, rotary)
    factor = {"rope_type": "llama3", "factor": float(divisors.max(initial=1.0))}
    for settings in _LLAMA3:
        rope = factor | settings
        if np.allclose(llama3_divisors(rope, theta, rotary), divisors, rtol=1e-4):
            return rope
    keys.fail(
        "rope.scaling.type",
        keys.get("rope.scaling.type", "none"),
        "the numbers of rope_freqs are not those of Llama 3.1 or Llama 4, which are served",
    )


def llama3_divisors(rope: Mapping[str, Any], theta: float, rotary: int) -> list[float]:
    """Return the divisor of the frequency of each pair of dims."""
    turns = rope["original_max_position_embeddings"] * theta ** (-2 * np.arange(rotary // 2) / rotary)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    with np.errstate(divide="ignore"):  # Llama 4's are equal: no frequency is between
        share = np.clip((turns / (2 * np.pi) - low) / np.float64(high - low), 0, 1)
    return list(map(float, 1 / ((1 - share) / rope["factor"] + share)))


def first(keys: GgufKeys, part: str) -> str:
    """Return the name of ``part`` in the first layer that has it, or in the first layer."""
    return f"blk.{next((layer for layer, has in enumerate(keys.layers_with(part)) if has), 0)}.{part}"


def kinds(keys: GgufKeys, recurrent: str) -> list[str]:
    return ["full_attention" if has else recurrent for has in keys.layers_with("attn_q.weight")]


FULL_KIND, WINDOW_KIND = "full_attention", "sliding_attention"


def window_kinds(keys: GgufKeys, window: int, every: int, *, full_first: bool = False) -> list[str]:
    """Return the kind of each layer. The key is a list with a flag for each layer that has a window, or a number n:
    every n-th layer has none; ``every`` where it is missing. ``full_first``: the first of n, not the last.
    """
    stated = keys.get("attention.sliding_window_pattern", every)
    if isinstance(stated, np.ndarray):
        has_window = [bool(flag) for flag in stated.tolist()]
    elif isinstance(stated, list):
        has_window = [bool(flag) for flag in stated]
    else:
        every = keys.integer("attention.sliding_window_pattern", every, least=1)
        has_window = [(layer + (not full_first)) % every > 0 for layer in range(keys.layers)]
    if len(has_window) != keys.layers:
        keys.fail("attention.sliding_window_pattern", stated, f"the file has {keys.layers} layers")
    return [WINDOW_KIND if has and window else FULL_KIND for has in has_window]


def eps(keys: GgufKeys) -> float:
    return keys.number("attention.layer_norm_rms_epsilon")


def experts(keys: GgufKeys) -> dict[str, Any]:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", _expert_width(keys)),
        "norm_topk_prob": True,
    }


def check_gating(keys: GgufKeys, served: int) -> None:
    """Raise CheckpointError if the file names another function by which experts are chosen."""
    if (choice := keys.integer("expert_gating_func", served)) != served:
        words = {SOFTMAX: "softmax", SIGMOID: "sigmoid", CHOSEN_SOFTMAX: "softmax of the chosen"}[served]
        keys.fail("expert_gating_func", choice, f"experts chosen by {words} ({served}) are served")


def _expert_width(keys: GgufKeys) -> int | None:
    """Return the rows of an expert's matrix: Ollama's converter leaves the key out."""
    for part, parts in (("ffn_up_exps.weight", 1), ("ffn_gate_up_exps.weight", 2)):
        tensor = keys.tensor(first(keys, part))
        if tensor is not None and len(tensor.shape) == 3:
            return tensor.shape[1] // parts
    return None


WHOLE: Names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION: Names = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
NORMS: Names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NEXT_TOKENS: Names = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
"""Names of the head for multi-token prediction."""
PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def dense(name: str, parts: Mapping[str, str] = PARTS) -> Names:
    return {f"ffn_{theirs}": f"{name}.{ours}" for theirs, ours in parts.items()}


def sparse(name: str, parts: Mapping[str, str] = PARTS, router: str = "gate") -> Names:
    stacks: Names = {f"ffn_{theirs}_exps": f"{name}.experts.{{e}}.{ours}" for theirs, ours in parts.items()}
    return stacks | {"ffn_gate_inp": f"{name}.{router}"}


def shared(name: str) -> Names:
    return {f"ffn_{theirs}_shexp": f"{name}.{ours}" for theirs, ours in PARTS.items()}


def mamba(name: str) -> Names:
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


def mamba1(name: str) -> Names:
    return mamba(name) | {
        "ssm_dt.bias": f"{name}.dt_proj.bias",
        "ssm_dt": f"{name}.dt_proj",
        "ssm_x": f"{name}.x_proj",
        "ssm_dt_norm": f"{name}.dt_layernorm",
        "ssm_b_norm": f"{name}.b_layernorm",
        "ssm_c_norm": f"{name}.c_layernorm",
    }


def pairs(heads: int, head_dim: int) -> Undo:
    """Return rows of a head as halves; the file has the rows i and i + D / 2 next to each other."""
    return Undo(np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).transpose(0, 2, 1).reshape(-1))


def interleaved(config: Mapping[str, Any]) -> dict[str, Undo]:
    q, k = (pairs(config[heads], config["head_dim"]) for heads in ("num_attention_heads", "num_key_value_heads"))
    return {
        f"self_attn.{part}.{end}": undo for part, undo in (("q_proj", q), ("k_proj", k)) for end in ("weight", "bias")
    }
