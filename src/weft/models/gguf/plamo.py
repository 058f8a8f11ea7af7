"""PLaMo 2 and 3 in GGUF files.

    plamo2    Mamba-2 and attention, whose norms of queries and keys have a row for each head
    plamo3    attention; layers with a window have a base of their own

The converter adds to norms what the release has them stored without: 1, or for norms after a block 1/5 and 1/5^1.5.
It writes no windows of PLaMo 2, and llama.cpp has none. Its releases without a base of their own have a window of 2,048
tokens in all layers, as its configuration says where config.json does not; a file with another base has none.
A PLaMo 3 that is not scaled is one of the older configurations, which count only tokens before a token in a window.

Source: llama.cpp's ``conversion`` package and its models ``plamo2`` and ``plamo3``.
"""

from __future__ import annotations

from typing import Any

from weft.models.gguf import parts
from weft.models.gguf.keys import GgufKeys
from weft.models.gguf.parts import FileLayout, Names, Undo

_STACK = "model.layers.layers"
_NEAR_THETA = 10_000.0
"""Base of layers with a window where config.json names none."""
_AFTER = {"post_attention_norm": ("post_mixer_norm", 5**-1), "post_ffw_norm": ("post_mlp_norm", 5**-1.5)}
"""Norms after blocks, which the converter writes without ``.weight``, and what it adds to them."""
_NAMES: Names = {
    "attn_qkv": "mixer.qkv_proj",
    "attn_output": "mixer.o_proj",
    "attn_norm": "pre_mixer_norm",
    "ffn_norm": "pre_mlp_norm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    **{theirs + end: f"{ours}.weight" for theirs, (ours, _) in _AFTER.items() for end in ("", ".weight")},
}
_MAMBA: Names = {
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.bcdt_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out": "mixer.out_proj",
    **{f"ssm_{part.lower()}_norm": f"mixer.{part}_norm_weight" for part in ("dt", "B", "C")},
}
_NORMS = {f"{name}.weight": parts.MINUS_ONE for name in ("model.norm", "pre_mixer_norm", "pre_mlp_norm")}
_NORMS |= {f"{ours}.weight": Undo(minus=added) for ours, added in _AFTER.values()}


def plamo2(keys: GgufKeys) -> FileLayout:
    attends, heads = keys.layers_with("attn_qkv.weight"), keys.integer("ssm.time_step_rank", least=1)
    theta = keys.number("rope.freq_base", _NEAR_THETA)
    config = _config(keys, "plamo2") | {
        "hidden_size_per_head": keys.integer("attention.key_length", least=1),
        "full_attention_idx": [] if theta == _NEAR_THETA else list(range(keys.layers)),
        "rope_theta": theta,
        "mamba_num_heads": heads,
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_step": _step(keys, attends),
    }
    names = _NAMES | _MAMBA | {f"attn_{part}_norm.weight": f"mixer.{part}_weight" for part in "qk"}
    return FileLayout(config, parts.WHOLE, names, _NORMS | {"mixer.A_log": parts.LOG}, _STACK)


def _step(keys: GgufKeys, attends: list[bool]) -> int:
    """Return ``mamba_step``: in the middle of so many layers is one of attention."""
    count = len(attends)
    for step in range(2, 2 * count + 2):
        last = count <= step // 2  # then only the last layer attends
        if attends == [layer == count - 1 if last else layer % step == step // 2 for layer in range(count)]:
            return step
    keys.fail("attention.head_count", keys.get("attention.head_count"), "attention must be in every n-th layer")


def plamo3(keys: GgufKeys) -> FileLayout:
    attended = parts.attention(keys)
    full = attended.pop("rope_parameters")
    window = keys.integer("attention.sliding_window", 0)
    config = (
        _config(keys, "plamo3")
        | attended
        | {
            "rope_theta": full["rope_theta"],
            "rope_local_theta": keys.number("rope.freq_base_swa", _NEAR_THETA),
            "window_size": window or 1,
            "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 8, least=1) if window else 1,
        }
    )
    if full["rope_type"] == "yarn":
        original = full["original_max_position_embeddings"]
        config |= {"rope_scaling_factor": full["factor"], "initial_context_length": original}
    names = _NAMES | {f"attn_{part}_norm": f"mixer.{part}_norm" for part in "qk"}
    undo = {f"mixer.{part}_norm.weight": parts.MINUS_ONE for part in "qk"}
    return FileLayout(config, parts.WHOLE, names, _NORMS | undo, _STACK)


def _config(keys: GgufKeys, model_type: str) -> dict[str, Any]:
    return parts.base(
        keys,
        model_type,
        num_attention_heads=keys.integer("attention.head_count", least=1),
        num_key_value_heads=keys.integer("attention.head_count_kv", least=1),
        intermediate_size=keys.integer("feed_forward_length"),
        rms_norm_eps=parts.eps(keys),
    )
