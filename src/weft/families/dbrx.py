"""DBRX: attention whose queries, keys and values have a limit, and experts that files store as the rows of one matrix.

    w1, v1, w2     [experts x width, hidden]: gate, up, and the transpose of down, one expert below the other

Source: the configuration class and the model of transformers 5.24; llama.cpp's ``conversion/dbrx.py`` for the base of
the positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.families.attention import NAMES
from weft.families.config_keys import ConfigKeys, fail
from weft.families.decoders import Decoder
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import Experts, FeedForward
from weft.families.reading import Family
from weft.families.residuals import Residual


def _part(keys: ConfigKeys, name: str) -> ConfigKeys:
    return keys.inner(name) or ConfigKeys({}, fallback={})


def _dbrx_keys(keys: ConfigKeys) -> ConfigKeys:
    """Return ``keys`` with the numbers of attention that are in a part of their own. Raises CheckpointError if both
    places of the rotary base name one, and these differ: releases have it in ``attn_config``, which transformers 5
    does not read, and its saves have a default besides."""
    attended = _part(keys, "attn_config")
    kv_heads, stated = attended.integer("kv_n_heads", 1), keys.get("rope_parameters") or {}
    if attended.get("rope_theta") is None or not isinstance(stated, Mapping):
        return keys.over({"num_key_value_heads": kv_heads})
    theta = attended.number("rope_theta", 10_000.0)
    other = ConfigKeys(stated, fallback={}).number("rope_theta", theta)
    if other != theta:
        fail("attn_config.rope_theta", theta, f"rope_parameters has {other}: remove the base that is not the model's")
    return keys.over({"num_key_value_heads": kv_heads, "rope_theta": theta})


def _limit(keys: ConfigKeys) -> Mapping[str, Any]:
    attended = _part(keys, "attn_config")
    clip = attended.number("clip_qkv", 0.0)
    if clip < 0 or (clip == 0 and attended.get("clip_qkv") is not None):
        fail("attn_config.clip_qkv", clip, "it must be above 0")
    return {"clip": clip}


def _dbrx_feed(keys: ConfigKeys, layer: int) -> FeedForward:
    """Read the experts. Their weights are divided by their p-norm, of which 1 is served: their sum."""
    part = _part(keys, "ffn_config")
    count, chosen = part.integer("moe_num_experts", 4), part.integer("moe_top_k", 1)
    if chosen > count:
        fail("ffn_config.moe_top_k", chosen, f"the model has {count} experts")
    stated = part.get("ffn_act_fn", {})
    activation = stated.get("name", "silu") if isinstance(stated, Mapping) else stated
    if activation != "silu":
        fail("ffn_config.ffn_act_fn", stated, "only silu is served")
    part.only("ffn_config.", moe_normalize_expert_weights=1.0, uniform_expert_assignment=False)
    power = "moe_normalize_expert_weights"
    normalized = part.get(power) is not None or not part.has(power)
    return Experts(count, chosen, part.integer("ffn_hidden_size", 3584), normalized)


_DBRX = Decoder(
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
    renamed={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    attention_of=_limit,
    feed=_dbrx_feed,
    residual=lambda keys: Residual(centred="weight"),
    only={"tie_word_embeddings": False},
    keys_of=_dbrx_keys,
)
FAMILIES = (
    Family("dbrx", ("dbrx",), _DBRX, names=replace(
        NAMES, spelled={Attention: {"joined": "Wqkv", "out": "out_proj"}}), released=(
        (r"^transformer\.wte\.", "model.embed_tokens."),
        (r"^transformer\.norm_f\.", "model.norm."),
        (r"^transformer\.blocks\.", "model.layers."),
        (r"\.norm_attn_norm\.attn\.", ".self_attn."),
        (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
        (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
        (r"\.ffn\.router\.layer\.", ".mlp.gate."),
        (r"\.ffn\.experts\.mlp\.w1$", ".mlp.experts.{e}.gate_proj.weight"),
        (r"\.ffn\.experts\.mlp\.v1$", ".mlp.experts.{e}.up_proj.weight"),
        (r"\.ffn\.experts\.mlp\.w2$", ".mlp.experts.{e}.down_proj.weight"),
    ), transposed=r"\.experts\.\d+\.down_proj\.weight$"),
)  # fmt: skip
